"""The table of `python -m benchmarks.vllm`."""

from __future__ import annotations

from typing import Any

__all__ = ["print_report"]


def print_report(document: dict[str, Any]) -> None:
    """Print the rates and ratios by number of streams."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "streams",
        "engine",
        "tokens/s",
        "of vLLM with local experts",
        box=None,
        title_justify="left",
    )
    table.title = f"{document['model']}: answers, medians of {document['rounds']} rounds"
    for row in document["rows"]:
        table.add_row(
            str(row["streams"]),
            row["engine"],
            f"{row['tokens_per_s']:.0f}",
            f"{row['ratio']:.2f}",
        )
    Console().print(table)
