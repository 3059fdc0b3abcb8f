"""`eaas bench traces`: what tracing costs."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer

from eaas.cli.options import Json

__all__ = ["register"]


def register(bench: typer.Typer) -> None:
    """Add the command."""
    bench.command("traces")(traces)


def traces(
    model: Annotated[
        Path | None,
        typer.Option("--model", help="Checkpoint.", show_default="a demo checkpoint"),
    ] = None,
    servers: Annotated[int, typer.Option(min=1, help="Expert servers.")] = 3,
    redundancy: Annotated[int, typer.Option(min=1, help="Servers that hold each expert.")] = 2,
    transport: Annotated[str, typer.Option(help="shm, grpc or nixl.")] = "shm",
    sampling: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the requests that are traced.")
    ] = 0.01,
    requests: Annotated[int, typer.Option(min=1, help="Requests in a round.")] = 64,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at a time.")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.")] = 32,
    max_tokens: Annotated[int, typer.Option(min=2, help="Tokens of an answer.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds of a pair of clusters.")] = 4,
    pairs: Annotated[
        int, typer.Option(min=1, help="Times that both clusters are started anew.")
    ] = 5,
    as_json: Json = False,
) -> None:
    """Decode tokens/s and processor time with tracing, over those without; pairs of clusters, in turn."""
    from eaas.bench.load import Workload
    from eaas.bench.traces import bench_traces

    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))
    with tempfile.TemporaryDirectory(prefix="eaas-bench-") as scratch:
        if model is None:
            from eaas.demo_model import write_demo_model

            model = Path(scratch) / "demo"
            write_demo_model(model)
        document = bench_traces(
            model,
            servers=servers,
            redundancy=redundancy,
            transport=transport,
            sampling=sampling,
            workload=Workload(requests, concurrency, prompt_tokens, max_tokens),
            rounds=rounds,
            pairs=pairs,
            say=lambda line: print(line, file=sys.stderr, flush=True),
        )
    if as_json:
        typer.echo(json.dumps(document))
    else:
        _print(document)


def _print(document: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None)
    for column in ("", "off", "on", "on / off", "each pair"):
        table.add_column(column, justify="right" if column else "left")
    for text, key in (
        ("decode tokens/s", "decode_tokens_per_s"),
        ("processor ms per token", "cpu_ms_per_token"),
    ):
        found = document[key]
        table.add_row(
            text,
            str(found["off"]),
            str(found["on"]),
            f"{found['ratio']:.4f}",
            " ".join(f"{ratio:.3f}" for ratio in found["ratios"]),
        )
    Console().print(table)
    spans = ", ".join(f"{count} {name}" for name, count in sorted(document["spans"].items()))
    print(f"{document['sampling']:.1%} of the requests traced; spans sent: {spans or 'none'}")
