"""What `eaas bench client` prints."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["print_report"]


def print_report(document: dict[str, Any]) -> None:
    """A row for each run, then what is wrong."""
    table = Table(box=None)
    columns = (
        *("run", "answered", "failed", "prompts differ", "outputs differ", "tokens"),
        *("tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99"),
    )
    for column in columns:
        table.add_column(column, justify="left" if column == "run" else "right")
    for row in document["runs"]:
        asked, figures = row["asked"], row["figures"]
        table.add_row(
            "counts" if asked["stop"] is None else "min_tokens",
            str(row["answered"]),
            str(len(row["failed"])),
            str(row["prompts_differ"]),
            str(row["outputs_differ"]),
            f"{row['fewest_tokens']} to {row['most_tokens']}",
            f"{figures['output_token_throughput']['avg']:.1f}" if figures else "",
            *(
                f"{figures[kind][p]:.0f} ms" if figures else ""
                for kind in ("time_to_first_token", "inter_token_latency")
                for p in ("p50", "p99")
            ),
        )
    Console().print(table)
    print(
        "differ: requests whose length by aiperf's tokenizer is not the one that the endpoint says"
    )
    for line in document["wrong"]:
        print(f"wrong: {line}")
