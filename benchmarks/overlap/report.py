"""The report of `python -m benchmarks.overlap`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["print_report"]


def print_report(document: dict[str, Any]) -> None:
    """Print a decode step with and without overlap."""
    table = Table(box=None)
    for column in ("added us", "sequences", "off ms", "on ms", "auto ms", "on/off", "auto/off"):
        table.add_column(column, justify="right")
    for row in document["rows"]:
        step_ms, ratio = row["step_ms"], row["ratio"]
        table.add_row(
            str(row["added_latency_us"]),
            str(row["sequences"]),
            *(f"{step_ms[way]:.1f}" for way in ("off", "on", "auto")),
            *(f"{ratio[way]:.2f}" for way in ("on", "auto")),
        )
    Console().print(table)
    print("times of a decode step; ratios of rates: above 1, overlap is faster")
