"""Measure how fast a joining server serves, by source of its weights, and the effect on other clients."""

from __future__ import annotations

from typing import Annotated

import typer

from eaas_cli.bench.command import command, end_on_sigterm, say, show
from eaas_cli.commands.options import Json
from eaas_cli.errors import exit_with_one_line


def main(
    share_mb: Annotated[int, typer.Option(min=1, help="MB of weights for the new server.")] = 1000,
    source: Annotated[
        list[str] | None,
        typer.Option(help="Source of the weights: disk or peers.", show_default="both"),
    ] = None,
    tokens: Annotated[
        int, typer.Option(min=1, help="Tokens per layer call of the other client.")
    ] = 8,
    calls: Annotated[float, typer.Option(min=1, help="Calls per second of that client.")] = 50,
    quiet: Annotated[
        float, typer.Option(min=1, help="Seconds of measurement before the join.")
    ] = 10,
    rounds: Annotated[int, typer.Option(min=1, help="Joins per source.")] = 3,
    as_json: Json = False,
) -> None:
    """Measure how fast a joining server serves, by source of its weights, and the effect on other clients."""
    end_on_sigterm()
    from eaas_cli.option_values import known

    sources = known("--source", source or ["disk", "peers"], ("disk", "peers"))
    from benchmarks.join import bench_join
    from benchmarks.join.report import print_report

    document = bench_join(
        share_bytes=share_mb * 1_000_000,
        sources=sources,
        tokens=tokens,
        calls_per_s=calls,
        quiet_s=quiet,
        rounds=rounds,
        say=say,
    )
    show(document, as_json, print_report)


app = command(main)

if __name__ == "__main__":
    exit_with_one_line(app)
