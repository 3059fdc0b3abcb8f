"""The report of `eaas bench serve`."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["print_serve"]


def print_serve(document: dict[str, Any]) -> None:
    """Print a cluster against one process."""
    table = Table(box=None)
    for column in ("", "tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99"):
        table.add_column(column, justify="right" if column else "left")
    for name in ("cluster", "single_process"):
        row = document[name]
        table.add_row(
            name,
            str(row["decode_tokens_per_s"]),
            *(f"{row[kind][p]:.1f} ms" for kind in ("ttft_ms", "itl_ms") for p in ("p50", "p99")),
        )
    Console().print(table)
    print(f"cluster / single process: {document['ratio']['decode_tokens_per_s']}")
    baseline = document["baseline"]
    print(
        f"the single process computed experts with {baseline['experts']}: "
        f"{baseline['implementation']}, {baseline['threads']} threads"
    )
