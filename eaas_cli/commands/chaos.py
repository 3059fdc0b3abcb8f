"""`eaas chaos run`: check a cluster's answers under injected faults."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eaas_cli.bench.command import model_or_demo, say, show
from eaas_cli.commands.options import DemoModel, Json, Transport

__all__ = ["chaos"]

chaos = typer.Typer(
    help="Fault injection: break a cluster under load and check every answer.", no_args_is_help=True
)


@chaos.callback()
def _chaos() -> None:
    pass


@chaos.command("run")
def run(
    seed: Annotated[
        int, typer.Option(help="Seed of faults and load; the same seed repeats a run.")
    ] = 1,
    minutes: Annotated[float, typer.Option(min=0.05, help="Duration of the faults.")] = 1.0,
    faults: Annotated[
        str,
        typer.Option(
            metavar="NAME,...",
            help="On expert servers: kill, hang, slow, partition, memory, pair. On attention clients: "
            "client-kill, client-hang, client-drain. Others: monitor, pause, balancer, rebalance, scale, "
            "damaged, unreachable, names.",
            show_default="all",
        ),
    ] = "",
    model: DemoModel = None,
    servers: Annotated[int, typer.Option(min=3, help="Expert servers.")] = 4,
    redundancy: Annotated[int, typer.Option(min=2, help="Servers that hold each expert.")] = 2,
    transport: Transport = "shm",
    rate: Annotated[float, typer.Option(min=0.1, help="Requests per second.")] = 4.0,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 24,
    history: Annotated[
        Path | None,
        typer.Option(
            "--history",
            metavar="FILE",
            help="Write every request and every fault to this file.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a cluster under load, inject faults from a seed, and check every answer.

    Every answer must be right, or one typed error if no replica was alive. Memory must not grow, and
    nothing may be left behind. Exit code 1: a violation.
    """
    from eaas_cli.chaos import run_chaos
    from eaas_cli.chaos.history import Settings
    from eaas_cli.chaos.report import print_report
    from eaas_cli.chaos.schedule import KINDS
    from eaas_cli.local.interrupt import Interrupt, Interrupted
    from eaas_cli.option_values import known, refuse_unwritable

    kinds = known("--faults", faults.split(",") if faults else KINDS, KINDS)
    if history is not None:
        refuse_unwritable("--history", history)
    named = str(model.resolve()) if model else ""
    settings = Settings(
        seed, 60 * minutes, kinds, servers, redundancy, transport, rate, max_tokens, named
    )
    with Interrupt() as interrupt, model_or_demo(model) as checkpoint:
        try:
            document = run_chaos(
                checkpoint, settings, interrupt=interrupt, say=say, history_file=history
            )
        except Interrupted as end:
            raise typer.Exit(end.code) from None
    show(document, as_json, print_report)
    if document["violations"]:
        say(f"repeat it with: {document['repeat']}")
        raise typer.Exit(1)
