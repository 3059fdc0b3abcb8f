"""`eaas knobs ...`: ScalpeLB's knobs, learned from recorded traces."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from eaas.cli.options import Json
from eaas.cli.progress import progress_bar

if TYPE_CHECKING:
    from balancer.live.learned import KnobFile

__all__ = ["register"]

knobs = typer.Typer(
    help="ScalpeLB's knobs, learned from recorded traces (docs/policies.md).",
    no_args_is_help=True,
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
        list[Path], typer.Argument(metavar="TRACE...", help="Trained on, one or more.")
    ],
    held_out: Annotated[
        list[Path],
        typer.Option(
            metavar="TRACE",
            help="Decides whether it is used; may be given several times.",
            show_default=False,
        ),
    ],
    out: Annotated[
        Path, typer.Option(metavar="FILE.safetensors", help="To write.", show_default=False)
    ],
    servers: Annotated[int, typer.Option(min=2, help="Of the clusters that are replayed.")] = 64,
    slots: Annotated[
        int | None, typer.Option(help="Replicas per layer.", show_default="experts + servers")
    ] = None,
    interval: Annotated[int, typer.Option(min=2, help="Iterations between plans.")] = 256,
    epochs: Annotated[int, typer.Option(min=1, help="How often each trace is gone through.")] = 12,
    rate: Annotated[float, typer.Option(min=1e-6, max=1.0, help="Of learning (Adam).")] = 0.03,
    lifetime: Annotated[
        int, typer.Option(min=1, help="Windows over which a placement is judged.")
    ] = 2,
    transit_weight: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="Mean PAR that a replica to be loaded is worth.",
            show_default="the competition's, 1.6e-6",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Same seed, same knobs.")] = 0,
    as_json: Json = False,
) -> None:
    """Learn knobs by gradient, and replay traces that were held out with them and with the defaults.

    A balancer takes the file (balancer.knobs) if it was better there.
    """
    from balancer.live.learned import write_knobs
    from eaas.errors import ConfigError
    from eaas.trace.readers import read_trace

    # Before the imports and the work: torch takes seconds, a typing error should not.
    if not out.parent.is_dir() or out.is_dir():
        raise ConfigError(f"--out {out}: give the name of a file in a directory that is there")
    learned_from = [(path, read_trace(path)) for path in traces]
    decided_by = [(path, read_trace(path)) for path in held_out]
    from eaas.knobs import Options
    from eaas.knobs import train as run
    from eaas.knobs.train import TRANSIT_WEIGHT

    options = Options(
        servers=servers,
        slots=slots,
        interval=interval,
        epochs=epochs,
        rate=rate,
        transit_weight=TRANSIT_WEIGHT if transit_weight is None else transit_weight,
        lifetime=lifetime,
        seed=seed,
    )
    with progress_bar() as bar:
        task = bar.add_task("", total=1.0)
        learned = run(
            learned_from,
            decided_by,
            options,
            lambda what, part: bar.update(task, description=what, completed=part),
        )
    write_knobs(out, learned.file)
    _show(out, learned.file, as_json)


@knobs.command("info")
def info(
    file: Annotated[
        Path, typer.Argument(metavar="FILE.safetensors", help="Of `eaas knobs train`.")
    ],
    as_json: Json = False,
) -> None:
    """Say what knobs were learned from, and how they did on the traces held out."""
    from balancer.live.learned import read_knobs

    _show(file, read_knobs(file, must_win=False), as_json)


def _show(path: Path, file: KnobFile, as_json: bool) -> None:
    document: dict[str, Any] = {
        "wins": file.wins,
        "ratio": file.ratio,
        "held_out": [asdict(run) for run in file.held_out],
        "provenance": file.provenance,
    }
    if as_json:
        typer.echo(json.dumps(document))
        return
    names = ", ".join(run["trace"] for run in file.provenance["traces"])
    loss = file.provenance["loss"]
    typer.echo(f"{path}: learned from {names}; cost of those {loss[0]:.4f} -> {min(loss):.4f}")
    for run in file.held_out:
        typer.echo(
            f"{run.trace}, {run.servers} servers, every {run.interval}: "
            f"PAR {run.static_par:.4f} -> {run.learned_par:.4f}, "
            f"transit {run.static_transit:,} -> {run.learned_transit:,}, "
            f"cost {run.static_cost:.4f} -> {run.learned_cost:.4f}"
        )
    verdict = "it wins" if file.wins else "it loses: no balancer takes it"
    typer.echo(f"cost {100 * file.ratio:.2f} % of the static defaults': {verdict}")
