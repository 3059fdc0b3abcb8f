"""The document of `eaas bench join` as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["print_report"]


def print_report(document: dict[str, Any]) -> None:
    """Print it."""
    table = Table(box=None)
    for column in ("from", "its MB/s", "join s", "MB/s", "ratio", "p99 ms", "slowest ms", "ratio"):
        table.add_column(column, justify="left" if column == "from" else "right")
    for row in document["rows"]:
        table.add_row(
            row["source"],
            f"{row['medium_mb_per_s']:.0f}",
            f"{row['join_s']:.2f}",
            f"{row['join_mb_per_s']:.0f}",
            f"{row['ratio']['rate']:.2f}",
            f"{row['before_ms']['p99']:.1f}",
            f"{row['meanwhile_ms']['slowest']:.1f}",
            f"{row['ratio']['slowest']:.2f}",
        )
    Console().print(table)
    print(
        f"a share of {document['share_bytes'] / 1e6:.0f} MB; p99 of others' layer calls before, "
        "the slowest of them while the server joined"
    )
