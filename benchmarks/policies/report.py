"""The report of `python -m benchmarks.policies`."""

from __future__ import annotations

from typing import Any

from eaas_cli.console import print_table

__all__ = ["print_report"]


def print_report(document: dict[str, Any]) -> None:
    """Print a row per policy and size."""
    rows = [
        (
            row["policy"],
            str(row["servers"]),
            str(row["slots"]),
            *(
                f"{row[kind][of]:.1f}"
                for kind in ("plan_ms", "again_ms")
                for of in ("median", "cpu")
            ),
            f"{row['limit_ms']:.0f}" if row["limit_ms"] else "",
            "" if row["peak_mb"] is None else f"{row['peak_mb']:.0f}",
            f"{row['par_mean']:.4f}",
            f"{row['gap_mean']:.4f}",
            f"{row['nodes_ratio']:.2f}",
            f"{row['alone']:.1%}",
            f"{row['nodes_alone']:.1%}",
            f"{row['nodes_par_rise']:.1e}",
        )
        for row in document["rows"]
    ]
    times = ("plan ms", "cpu", "again ms", "cpu")
    nodes = ("with nodes", "alone", "then", "PAR rise")
    print_table(
        ("policy", "servers", "slots", *times, "limit", "peak MB", "PAR", "gap", *nodes), rows
    )
    print("medians of wall time and processor time; limit: allowed time on one core")
    print("peak MB: what planning adds to a process's resident memory, in one of its own")
    print(
        "with nodes: planning time over that without; alone, then: experts with several replicas on one"
    )
    print(
        "node only, without and with nodes known; PAR rise: the most that nodes add to a layer's PAR"
    )
    print("again: with a current plan and changed loads; gap: PAR / lower bound")
