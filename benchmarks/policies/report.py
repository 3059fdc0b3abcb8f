"""The report of `python -m benchmarks.policies`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["print_report"]


def print_report(document: dict[str, Any]) -> None:
    """Print a row per policy and size."""
    table = Table(box=None)
    columns = (
        "policy",
        "servers",
        "slots",
        "plan ms",
        "cpu",
        "again ms",
        "cpu",
        "limit",
        "PAR",
        "gap",
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "policy" else "right", no_wrap=True)
    for row in document["rows"]:
        limit = row["limit_ms"]
        table.add_row(
            row["policy"],
            str(row["servers"]),
            str(row["slots"]),
            *(
                f"{row[kind][of]:.1f}"
                for kind in ("plan_ms", "again_ms")
                for of in ("median", "cpu")
            ),
            f"{limit:.0f}" if limit else "",
            f"{row['par_mean']:.4f}",
            f"{row['gap_mean']:.4f}",
        )
    Console().print(table)
    print("medians of wall time and processor time; limit: allowed time on one core")
    print("again: with a current plan and changed loads; gap: PAR / lower bound")
