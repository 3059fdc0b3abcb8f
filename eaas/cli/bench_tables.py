"""What `eaas bench` prints for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

__all__ = ["print_overlap", "print_policies", "print_select", "print_serve"]


def print_select(document: dict[str, Any]) -> None:
    """`eaas bench select`: a decision of each strategy."""
    table = Table(box=None)
    for column in ("window", "experts", "strategy", "cost", "p50 us", "p99 us"):
        table.add_column(column, justify="left" if column in ("strategy", "cost") else "right")
    for row in document["rows"]:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)


def print_overlap(document: dict[str, Any]) -> None:
    """`eaas bench overlap`: a decode step, with and without overlap."""
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
    print("a decode step; the ratios are of rates: above 1, overlap is faster")


def print_policies(document: dict[str, Any]) -> None:
    """`eaas bench policies`: planning times."""
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
    print("medians, by the clock and of processor time; limit: of a plan on one core")
    print("again: with a plan in place and loads that changed; gap: PAR / lower bound")


def print_serve(document: dict[str, Any]) -> None:
    """`eaas bench serve`: a cluster beside one process."""
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
