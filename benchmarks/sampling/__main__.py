"""Measure the time to choose a step's next tokens, by the settings of the requests."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from eaas_cli.bench.command import command, end_on_sigterm, show
from eaas_cli.commands.options import Json
from eaas_cli.console import print_table
from eaas_cli.errors import exit_with_one_line


def main(
    rows: Annotated[int, typer.Option(min=1, help="Requests with a new token.")] = 16,
    vocabulary: Annotated[int, typer.Option(min=300, help="Tokens of the vocabulary.")] = 151_936,
    rounds: Annotated[int, typer.Option(min=1, help="Measured steps; the fastest counts.")] = 10,
    device: Annotated[str, typer.Option(help="torch device of the logits.")] = "cpu",
    as_json: Json = False,
) -> None:
    """Measure the time to choose a step's next tokens, by the settings of the requests."""
    end_on_sigterm()
    from benchmarks.sampling.run import bench_sampling

    show(bench_sampling(rows, vocabulary, rounds, device), as_json, _report)


def _report(document: dict[str, Any]) -> None:
    print_table(
        ("settings", "step ms"),
        [(name, f"{step_ms:.1f}") for name, step_ms in document["step_ms"].items()],
    )
    print(f"{document['rows']} rows of {document['vocabulary']} tokens on {document['device']}")


app = command(main)

if __name__ == "__main__":
    exit_with_one_line(app)
