"""The report of `python -m benchmarks.client`."""

from __future__ import annotations

from typing import Any

from eaas_cli.console import print_table

__all__ = ["print_report"]


def print_report(document: dict[str, Any]) -> None:
    """Print a row per aiperf run, then the failures and disagreements."""
    rows = []
    for row in document["runs"]:
        figures, off = row["figures"], row["outputs_off"]
        rows.append(
            (
                "counts" if row["asked"]["stop"] is None else "min_tokens",
                str(row["answered"]),
                str(len(row["failed"])),
                str(row["prompts_differ"]),
                f"{row['outputs_differ']}, by {off}" if off else "0",
                f"{row['fewest_tokens']}-{row['most_tokens']}",
                *(_times(figures) if figures else ("", "", "")),
            )
        )
    counts = ("ok", "failed", "prompts", "outputs", "tokens")
    print_table(("run", *counts, "tokens/s", "TTFT ms", "ITL ms"), rows)
    print(
        "prompts, outputs: requests whose length differs between aiperf and the endpoint.\n"
        "In the run `min_tokens` aiperf uses the endpoint's counts; in the others its tokenizer splits\n"
        "the text of an answer, sometimes differently. TTFT, ITL: p50 / p99."
    )
    for line in document["wrong"]:
        print(f"wrong: {line}")


def _times(figures: dict[str, dict[str, float]]) -> list[str]:
    ttft, itl = figures["time_to_first_token"], figures["inter_token_latency"]
    return [
        f"{figures['output_token_throughput']['avg']:.1f}",
        *(f"{of['p50']:.0f} / {of['p99']:.0f}" for of in (ttft, itl)),
    ]
