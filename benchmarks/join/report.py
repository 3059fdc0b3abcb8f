"""The report of `python -m benchmarks.join`."""

from __future__ import annotations

from typing import Any

from eaas_cli.console import print_table

__all__ = ["print_report"]


def print_report(document: dict[str, Any]) -> None:
    """Print a row per join of a server."""
    rows = [
        (
            row["source"],
            f"{row['medium_mb_per_s']:.0f}",
            f"{row['join_s']:.2f}",
            f"{row['join_mb_per_s']:.0f}",
            f"{row['ratio']['rate']:.2f}",
            f"{row['before_ms']['p99']:.1f}",
            f"{row['meanwhile_ms']['slowest']:.1f}",
            f"{row['ratio']['slowest']:.2f}",
        )
        for row in document["rows"]
    ]
    print_table(
        ("from", "its MB/s", "join s", "MB/s", "ratio", "p99 ms", "slowest ms", "ratio"), rows
    )
    print(
        f"share: {document['share_bytes'] / 1e6:.0f} MB; p99 ms: other client's layer calls before the join; "
        "slowest ms: during it"
    )
