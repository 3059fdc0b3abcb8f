"""Measure the throughput before, during and after faults, against the same work without them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eaas_cli.bench.command import command, end_on_sigterm, model_or_demo, say, show
from eaas_cli.commands.options import DemoModel, Json, Transport
from eaas_cli.errors import exit_with_one_line


def main(
    model: DemoModel = None,
    servers: Annotated[int, typer.Option(min=2, help="Expert servers.")] = 8,
    redundancy: Annotated[int, typer.Option(min=1, help="Servers that hold each expert.")] = 2,
    faults: Annotated[int, typer.Option(min=1, help="Number of faults, one after another.")] = 10,
    kind: Annotated[
        str,
        typer.Option(help="kill (SIGKILL and restart), hang (SIGSTOP for 2.5 s), or both in turn."),
    ] = "kill",
    streams: Annotated[int, typer.Option(min=1, help="Answers at a time.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=16, help="Tokens per answer.")] = 400,
    fixed_group: Annotated[
        bool,
        typer.Option(
            "--fixed-group/--no-fixed-group",
            help="Also measure a fixed group, which each fault restarts as a whole.",
        ),
    ] = True,
    transport: Transport = "shm",
    seed: Annotated[int, typer.Option(help="Seed of the victims and the prompts.")] = 1,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE.png", help="Draw tokens/s over time.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the throughput before, during and after faults, against the same work without them."""
    from benchmarks.failover import bench_failover
    from benchmarks.failover.report import draw_plot, print_report
    from benchmarks.failover.run import KINDS
    from eaas_cli.bench.experts.plot import check_plot
    from eaas_cli.option_values import known

    end_on_sigterm()
    kinds = known("--kind", KINDS if kind == "both" else [kind], KINDS)
    if plot is not None:
        check_plot(plot)
    with model_or_demo(model) as checkpoint:
        document = bench_failover(
            checkpoint,
            servers=servers,
            redundancy=redundancy,
            faults=faults,
            kinds=kinds,
            streams=streams,
            max_tokens=max_tokens,
            fixed_group=fixed_group,
            seed=seed,
            transport=transport,
            say=say,
        )
    if plot is not None:
        draw_plot(document, plot)
    show(document, as_json, print_report)


app = command(main)

if __name__ == "__main__":
    exit_with_one_line(app)
