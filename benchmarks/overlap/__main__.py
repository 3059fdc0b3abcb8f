"""Measure decode steps with double-batch overlap on, off and auto, with distant servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from eaas.checkpoint.source import local_directory
from eaas.garbage_collection import collector_off
from eaas_cli.bench.command import command, end_on_sigterm, model_or_demo, say, show
from eaas_cli.commands.options import Json
from eaas_cli.errors import exit_with_one_line


def main(
    model: Annotated[
        Path | None,
        typer.Option(
            "--model",
            help="Checkpoint.",
            parser=local_directory,
            show_default="a demo checkpoint, hidden 512",
        ),
    ] = None,
    servers: Annotated[int, typer.Option(min=1, help="Expert servers.")] = 1,
    transport: Annotated[
        str, typer.Option(help="Transport to the servers: shm, grpc or nixl.")
    ] = "shm",
    latency: Annotated[
        str, typer.Option(metavar="US,...", help="Added latency of each request, microseconds.")
    ] = "0,2000,5000,10000",
    sequences: Annotated[str, typer.Option(metavar="B,...", help="Batch sizes.")] = "8,32,128",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt.")] = 64,
    steps: Annotated[int, typer.Option(min=2, help="Decode steps per round.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="Measured rounds per setting.")] = 3,
    as_json: Json = False,
) -> None:
    """Measure decode steps with double-batch overlap on, off and auto, with distant servers."""
    from benchmarks.overlap.report import print_report
    from eaas_cli.option_values import numbers

    end_on_sigterm()
    # Check before the imports, which take seconds, so that a mistake is named at once.
    latency_us = numbers("--latency", latency, least=0)
    batches = numbers("--sequences", sequences)
    with collector_off():
        from benchmarks.overlap.run import bench_overlap

    with model_or_demo(model, hidden=512, max_shard_size="100MB") as checkpoint:
        document = bench_overlap(
            checkpoint,
            servers=servers,
            transport=transport,
            latency_us=latency_us,
            sequences=batches,
            prompt_tokens=prompt_tokens,
            steps=steps,
            rounds=rounds,
            say=say,
        )
    show(document, as_json, print_report)


app = command(main)

if __name__ == "__main__":
    exit_with_one_line(app)
