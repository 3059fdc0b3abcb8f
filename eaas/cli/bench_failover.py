"""`eaas bench failover`: faults one after another on a running cluster."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from eaas.cli.options import Json

__all__ = ["register"]


def register(bench: typer.Typer) -> None:
    """Add the command."""
    bench.command("failover")(failover)


def failover(
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Checkpoint.", show_default="a demo checkpoint"),
    ] = None,
    servers: Annotated[int, typer.Option(min=2, help="Expert servers.")] = 8,
    redundancy: Annotated[int, typer.Option(min=1, help="Servers that hold each expert.")] = 2,
    faults: Annotated[int, typer.Option(min=1, help="How many, one after another.")] = 10,
    kind: Annotated[
        str,
        typer.Option(
            help="kill (SIGKILL, started again at once), hang (SIGSTOP for 2.5 s), or both in turn."
        ),
    ] = "kill",
    streams: Annotated[int, typer.Option(min=1, help="Answers at a time.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=16, help="Tokens of an answer.")] = 400,
    fixed_group: Annotated[
        bool,
        typer.Option(
            "--fixed-group/--no-fixed-group",
            help="The same faults, each of which ends the whole cluster, too.",
        ),
    ] = True,
    transport: Annotated[str, typer.Option(help="shm, grpc or nixl.")] = "shm",
    seed: Annotated[int, typer.Option(help="Draws who is hit, and the prompts.")] = 1,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw tokens/s over time.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Throughput before, during and after faults, against the same work without them."""
    from eaas.bench.experts.plot import check_plot
    from eaas.bench.failover import bench_failover
    from eaas.bench.failover.report import draw_plot, print_report
    from eaas.bench.failover.run import KINDS
    from eaas.bench.options import known

    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))
    kinds = known("--kind", KINDS if kind == "both" else [kind], KINDS)
    if plot is not None:
        check_plot(plot)
    with tempfile.TemporaryDirectory(prefix="eaas-bench-") as scratch:
        if model is None:
            from eaas.demo_model import write_demo_model

            model = Path(scratch) / "demo"
            write_demo_model(model)
        document = bench_failover(
            model,
            servers=servers,
            redundancy=redundancy,
            faults=faults,
            kinds=kinds,
            streams=streams,
            max_tokens=max_tokens,
            fixed_group=fixed_group,
            seed=seed,
            transport=transport,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    if plot is not None:
        draw_plot(document, plot)
    if as_json:
        typer.echo(json.dumps(document))
    else:
        print_report(document)
