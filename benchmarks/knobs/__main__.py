"""Learn ScalpeLB's knobs from routing traces, and replay held-out traces with them and with the defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from eaas_cli.bench.command import command, say, show
from eaas_cli.commands.options import Json
from eaas_cli.errors import exit_with_one_line


def main(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="Traces to train on, one or more.")
    ],
    held_out: Annotated[
        list[Path],
        typer.Option(
            metavar="TRACE",
            help="Trace to compare the learned knobs with the defaults on. Repeatable.",
            show_default=False,
        ),
    ],
    servers: Annotated[int, typer.Option(min=2, help="Servers of the replayed clusters.")] = 64,
    interval: Annotated[int, typer.Option(min=2, help="Iterations between plans.")] = 256,
    epochs: Annotated[int, typer.Option(min=1, help="Passes over each trace.")] = 12,
    transit_weight: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Mean PAR that one loaded replica costs.",
            show_default="the competition's, 1.6e-6",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same knobs.")] = 0,
    as_json: Json = False,
) -> None:
    """Learn ScalpeLB's knobs from routing traces, and replay held-out traces with them and the defaults."""
    from benchmarks.knobs.train import TRANSIT_WEIGHT, Options, train
    from eaas.errors import ConfigError
    from simulator.traces.readers import read_trace

    if both := set(traces) & set(held_out):
        raise ConfigError(f"{both.pop()} is trained on and held out: hold another trace out")
    weight = TRANSIT_WEIGHT if transit_weight is None else transit_weight
    document = train(
        [(path.name, read_trace(path)) for path in traces],
        [(path.name, read_trace(path)) for path in held_out],
        Options(servers, interval, epochs, weight, seed),
        say,
    )
    show(document, as_json, _print)


def _print(document: dict[str, Any]) -> None:
    print(f"cost of the training traces {document['loss'][0]:.4f} -> {min(document['loss']):.4f}")
    for row in document["held_out"]:
        knobs = " ".join(f"{name}={value:.3g}" for name, value in row["knobs"].items())
        print(
            f"{row['trace']}: PAR {row['static_par']:.4f} -> {row['learned_par']:.4f}, "
            f"transit {row['static_transit']:,} -> {row['learned_transit']:,}, "
            f"cost {100 * row['learned_cost'] / row['static_cost']:.2f} % of the defaults', "
            f"mean knobs {knobs}"
        )


app = command(main)

if __name__ == "__main__":
    exit_with_one_line(app)
