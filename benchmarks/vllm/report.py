"""The table of `python -m benchmarks.vllm`."""

from __future__ import annotations

from typing import Any

__all__ = ["print_report"]


def print_report(document: dict[str, Any]) -> None:
    """Print the rates and ratios by number of streams."""
    from rich.console import Console
    from rich.table import Table

    table = Table(
        *("streams", "prompt", "engine", "tokens/s", "ratio", "first token, ms", "ratio"),
        box=None,
        title_justify="left",
    )
    table.title = (
        f"{document['model']}: answers of {document['max_tokens']} tokens, medians of "
        f"{document['rounds']} rounds; ratios to {document['reference']}"
    )
    for row in document["rows"]:
        table.add_row(
            str(row["streams"]),
            str(row["prompt"]),
            row["engine"],
            f"{row['tokens_per_s']:.0f}",
            f"{row['ratio']:.2f}",
            f"{row['first_s'] * 1e3:.0f}",
            f"{row['first_ratio']:.2f}",
        )
    Console().print(table)
