"""The report of `python -m benchmarks.overlap`."""

from __future__ import annotations

from typing import Any

from eaas_cli.console import print_table

__all__ = ["print_report"]


def print_report(document: dict[str, Any]) -> None:
    """Print the time of a decode step with and without overlap, per latency and batch size."""
    rows = [
        (
            str(row["added_latency_us"]),
            str(row["sequences"]),
            *(f"{row['step_ms'][way]:.1f}" for way in ("off", "on", "auto")),
            *(f"{row['ratio'][way]:.2f}" for way in ("on", "auto")),
        )
        for row in document["rows"]
    ]
    print_table(("added us", "sequences", "off ms", "on ms", "auto ms", "on/off", "auto/off"), rows)
    print("times of a decode step; ratios of rates: above 1, overlap is faster")
