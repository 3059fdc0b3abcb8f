"""Simulate clients that share expert servers: layer-call times by what a client knows of the queues."""

from __future__ import annotations

from typing import Annotated

import typer

from eaas_cli.bench.command import command, end_on_sigterm, say, show
from eaas_cli.commands.options import Json
from eaas_cli.errors import exit_with_one_line


def main(
    servers: Annotated[int, typer.Option(min=2, help="Expert servers.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens of a layer call.")] = 1024,
    calls: Annotated[int, typer.Option(min=100, help="Layer calls per run.")] = 600,
    seeds: Annotated[int, typer.Option(min=1, help="Runs with other random numbers.")] = 3,
    as_json: Json = False,
) -> None:
    """Simulate clients that share expert servers: layer-call times by what a client knows of the queues."""
    from benchmarks.queues.run import bench_queues, print_report

    end_on_sigterm()
    show(bench_queues(servers, tokens, calls, seeds, say=say), as_json, print_report)


app = command(main)

if __name__ == "__main__":
    exit_with_one_line(app)
