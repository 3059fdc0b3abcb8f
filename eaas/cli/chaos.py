"""`eaas chaos ...`: a cluster that is attacked on purpose."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from eaas.cli.options import Json

__all__ = ["register"]

chaos = typer.Typer(help="Attacks on a cluster, on purpose.", no_args_is_help=True)
# As a shell says of a program that Ctrl-C ended.
_INTERRUPTED = 130


def register(app: typer.Typer) -> None:
    """Add the commands."""
    app.add_typer(chaos, name="chaos")


@chaos.callback()
def _chaos() -> None:
    pass


@chaos.command("run")
def run(
    seed: Annotated[
        int, typer.Option(help="Draws faults and load; the same again is the same.")
    ] = 1,
    minutes: Annotated[float, typer.Option(min=0.05, help="For so long faults come.")] = 1.0,
    faults: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="kill, hang, slow, partition, memory, pair (of expert servers); "
            "monitor, pause, balancer, rebalance, scale, damaged, unreachable, names.",
            show_default="all",
        ),
    ] = "",
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Checkpoint.", show_default="a demo checkpoint"),
    ] = None,
    servers: Annotated[int, typer.Option(min=3, help="Expert servers.")] = 4,
    redundancy: Annotated[int, typer.Option(min=2, help="Servers that hold each expert.")] = 2,
    transport: Annotated[str, typer.Option(help="shm, grpc or nixl.")] = "shm",
    rate: Annotated[float, typer.Option(min=0.1, help="Requests per second.")] = 4.0,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 24,
    history: Annotated[
        Path | None,
        typer.Option(
            "--history",
            metavar="FILE",
            help="Write every request and every fault there.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Faults from a seed on a cluster of its own, under load with known answers; exit code 1: a violation.

    Every answer must be right, or one typed error where no replica lived; nothing may grow, or be left.
    """
    from eaas.bench.options import known
    from eaas.chaos import run_chaos
    from eaas.chaos.report import print_report
    from eaas.chaos.run import Settings
    from eaas.chaos.schedule import KINDS
    from eaas.local.interrupt import Interrupt, Interrupted

    kinds = known("--faults", faults.split(",") if faults else KINDS, KINDS)
    named = str(model.resolve()) if model else ""
    settings = Settings(
        seed, 60 * minutes, kinds, servers, redundancy, transport, rate, max_tokens, named
    )
    with Interrupt() as interrupt, tempfile.TemporaryDirectory(prefix="eaas-chaos-") as scratch:
        try:
            if model is None:
                from eaas.demo_model import write_demo_model

                model = Path(scratch) / "demo"
                write_demo_model(model)
            document = run_chaos(
                model, settings, interrupt=interrupt, say=_say, history_file=history
            )
        except Interrupted:
            raise typer.Exit(_INTERRUPTED) from None
    if as_json:
        typer.echo(json.dumps(document))
    else:
        print_report(document)
    if document["violations"]:
        _say(f"repeat it with: {document['repeat']}")
        raise typer.Exit(1)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
