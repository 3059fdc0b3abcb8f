"""The table of `python -m benchmarks.quality`."""

from __future__ import annotations

from typing import Any

from eaas_cli.console import print_table

__all__ = ["print_report"]


def print_report(document: dict[str, Any]) -> None:
    """Print perplexities and ratios by format."""
    windows = document["texts"]
    print_table(
        ("format", "served", "to bf16", "dequantised", "to bf16", "served/deq.", "kernel"),
        [
            (
                row["format"],
                *(
                    text
                    for column in (row["served"], row["dequantised"])
                    for text in (f"{column['perplexity']:.3f}", _ratio(column))
                ),
                _ratio(row),
                row["kernel"].partition(";")[0],
            )
            for row in document["formats"]
        ],
        left=("kernel",),
        title=f"{document['model']}: perplexity on {sum(windows.values())} windows of "
        f"{document['length']} tokens ({', '.join(windows)})",
    )
    print(
        "served: by a cluster in bf16; dequantised: by transformers in float32; +-: standard error"
    )
    for name, why in document["left_out"].items():
        print(f"left out: {name} ({why})")


def _ratio(row: dict[str, Any]) -> str:
    return f"{row['ratio']:.4f} +- {row['error']:.4f}"
