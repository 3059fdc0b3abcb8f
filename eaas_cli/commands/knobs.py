"""`eaas knobs train`: learns ScalpeLB's knobs from recorded traces."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from eaas_cli.commands.options import Json
from eaas_cli.commands.progress import progress_bar

__all__ = ["register"]

knobs = typer.Typer(
    help="Learn ScalpeLB's knobs from recorded traces (docs/policies.md).", no_args_is_help=True
)


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(knobs, name="knobs")


@knobs.callback()
def _knobs() -> None:
    pass


@knobs.command("train")
def train(
    traces: Annotated[
        list[Path], typer.Argument(metavar="TRACE...", help="Traces to train on, one or more.")
    ],
    held_out: Annotated[
        list[Path],
        typer.Option(
            metavar="TRACE",
            help="Trace to compare the learned knobs with the defaults on; may be repeated.",
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
    """Learn knobs by gradient, and replay held-out traces with them and with the defaults."""
    from eaas.errors import ConfigError
    from simulator.traces.readers import read_trace

    if both := set(traces) & set(held_out):
        raise ConfigError(f"{both.pop()} is trained on and held out: hold another trace out")
    learned_from = [(path.name, read_trace(path)) for path in traces]
    compared = [(path.name, read_trace(path)) for path in held_out]
    from simulator.learned_knobs import Options
    from simulator.learned_knobs import train as run
    from simulator.learned_knobs.train import TRANSIT_WEIGHT

    weight = TRANSIT_WEIGHT if transit_weight is None else transit_weight
    options = Options(servers, interval, epochs, weight, seed)
    with progress_bar() as bar:
        task = bar.add_task("", total=1.0)
        learned = run(
            learned_from,
            compared,
            options,
            lambda what, part: bar.update(task, description=what, completed=part),
        )
    if as_json:
        rows = [asdict(result) for result in learned.held_out]
        typer.echo(json.dumps({"loss": learned.loss, "held_out": rows}))
        return
    typer.echo(f"cost of the training traces {learned.loss[0]:.4f} -> {min(learned.loss):.4f}")
    for result in learned.held_out:
        values = " ".join(f"{name}={value:.3g}" for name, value in result.knobs.items())
        typer.echo(
            f"{result.trace}: PAR {result.static_par:.4f} -> {result.learned_par:.4f}, "
            f"transit {result.static_transit:,} -> {result.learned_transit:,}, "
            f"cost {100 * result.learned_cost / result.static_cost:.2f} % of the defaults', "
            f"mean knobs {values}"
        )
