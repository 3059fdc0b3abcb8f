"""`eaas bench client`: aiperf drives the chat endpoint."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from eaas.cli.options import Json

__all__ = ["register"]


def register(bench: typer.Typer) -> None:
    """Add the command."""
    bench.command("client")(client)


def client(
    model: Annotated[
        Path, typer.Option("--model", help="Checkpoint that is served, with its tokenizer.")
    ],
    aiperf: Annotated[
        Path, typer.Option(metavar="FILE", help="The program; make bench-client installs it.")
    ] = Path(".venv-bench/bin/aiperf"),
    endpoint: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A running one.", show_default="a cluster is started"),
    ] = None,
    servers: Annotated[int, typer.Option(min=1, help="Expert servers of the cluster.")] = 3,
    redundancy: Annotated[int, typer.Option(min=1, help="Servers that hold each expert.")] = 2,
    transport: Annotated[str, typer.Option(help="shm, grpc or nixl.")] = "shm",
    requests: Annotated[int, typer.Option(min=1, help="Requests of a run.")] = 32,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 4,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 64,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 48,
    rounds: Annotated[int, typer.Option(min=1, help="Runs, before one with min_tokens.")] = 3,
    as_json: Json = False,
) -> None:
    """Another's client: does it get every answer, and count the tokens that the endpoint counts?"""
    from eaas.bench.client import bench_client
    from eaas.bench.client.aiperf import Asked
    from eaas.bench.client.report import print_report

    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))
    document = bench_client(
        aiperf,
        model,
        endpoint=endpoint,
        servers=servers,
        redundancy=redundancy,
        transport=transport,
        asked=Asked(requests, concurrency, prompt_tokens, max_tokens),
        rounds=rounds,
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    if as_json:
        typer.echo(json.dumps(document))
    else:
        print_report(document)
    if document["wrong"]:
        raise typer.Exit(1)
