"""The document of `eaas bench rebalance` as a table."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["print_report"]


def print_report(document: dict[str, Any]) -> None:
    """Print it."""
    table = Table(box=None)
    for column in ("load s", "MB/s", "before ms", "meanwhile ms", "ratio", "p99 ms", "p99 ms"):
        table.add_column(column, justify="right")
    for row in document["rows"]:
        table.add_row(
            f"{row['prepare_s']:.2f}",
            f"{row['load_mb_per_s']:.0f}",
            f"{row['before_ms']['p50']:.2f}",
            f"{row['meanwhile_ms']['p50']:.2f}",
            f"{row['ratio']:.3f}",
            f"{row['before_ms']['p99']:.2f}",
            f"{row['meanwhile_ms']['p99']:.2f}",
        )
    Console().print(table)
    print(
        f"replicas of {document['share_bytes'] / 1e6:.0f} MB loaded beside "
        f"{document['calls_per_s']:.0f} layer calls a second; median ratio of the medians "
        f"{document['ratio']:.3f}"
    )
