"""Drive the endpoint with aiperf: every request must succeed, and token counts must agree."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eaas.checkpoint.source import local_directory
from eaas_cli.bench.command import command, end_on_sigterm, say, show
from eaas_cli.commands.options import Json, Transport
from eaas_cli.errors import exit_with_one_line


def main(
    model: Annotated[
        Path,
        typer.Option(
            "--model", help="Checkpoint to serve, with its tokenizer.", parser=local_directory
        ),
    ],
    aiperf: Annotated[
        Path, typer.Option(metavar="FILE", help="Program; `make bench-client` installs it.")
    ] = Path(".venv-bench/bin/aiperf"),
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Running endpoint.", show_default="start a cluster"),
    ] = None,
    servers: Annotated[int, typer.Option(min=1, help="Expert servers of the cluster.")] = 3,
    redundancy: Annotated[int, typer.Option(min=1, help="Servers that hold each expert.")] = 2,
    transport: Transport = "shm",
    requests: Annotated[int, typer.Option(min=1, help="Requests per run.")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens per answer.")] = 48,
    rounds: Annotated[int, typer.Option(min=1, help="Runs before the one with min_tokens.")] = 3,
    as_json: Json = False,
) -> None:
    """Drive the endpoint with aiperf: every request must succeed, and token counts must agree."""
    from benchmarks.client import bench_client
    from benchmarks.client.aiperf import Asked
    from benchmarks.client.report import print_report

    end_on_sigterm()
    document = bench_client(
        aiperf,
        model,
        endpoint=endpoint,
        servers=servers,
        redundancy=redundancy,
        transport=transport,
        asked=Asked(requests, concurrency, prompt_tokens, max_tokens),
        rounds=rounds,
        say=say,
    )
    show(document, as_json, print_report)
    if document["wrong"]:
        raise typer.Exit(1)


app = command(main)

if __name__ == "__main__":
    exit_with_one_line(app)
