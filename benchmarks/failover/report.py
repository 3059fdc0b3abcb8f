"""Report and plot of `python -m benchmarks.failover`."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from eaas_cli.console import print_table

__all__ = ["draw_plot", "print_report"]


def print_report(document: dict[str, Any]) -> None:
    """Print a row per fault, then the lost throughput."""
    rows = [
        (
            row["kind"],
            row["server"],
            f"{row['quiet_s']:.2f}",
            f"{row['faulted_s']:.2f}",
            f"{row['stall_ms']:.0f}",
            f"{row['whole_again_s']:.1f}",
            f"{row['replacement_cpu_s']:.2f}",
        )
        for row in document["faults"]
    ]
    columns = ("fault", "server", "quiet s", "faulted s", "stall ms", "whole again s", "CPU s")
    print_table(columns, rows, left=("server",))
    lost, stall = document["lost"], document["worst_stall_ms"]
    print(
        f"tokens/s: {lost['tokens_per_s_quiet']:.1f} without faults, "
        f"{lost['tokens_per_s_faulted']:.1f} with them\n"
        f"lost: {lost['gross']:.2%} (standard error {lost['gross_error']:.2%}), of which replacements' "
        f"processor time {lost['capacity']:.2%}; "
        f"beyond that {lost['beyond_capacity']:.2%}; {lost['seconds_per_fault']:.2f} s per fault\n"
        f"failed requests: {document['failed_requests']}, wrong answers: {document['wrong_answers']}, "
        f"worst stall: {stall['faulted']:.0f} ms (without faults {stall['quiet']:.0f} ms)"
    )
    if group := document.get("fixed_group"):
        print(
            f"a fixed group, restarted as a whole: {group['lost']:.1%} lost, "
            f"{group['failed_requests']} failed requests, down for {group['down_s']['mean']:.1f} s "
            f"each time, worst pause {group['worst_pause_ms']:.0f} ms"
        )


def draw_plot(document: dict[str, Any], path: Path) -> None:
    """Draw tokens per second over time into a PNG: quiet, faulted, fixed group."""
    figure = importlib.import_module("matplotlib.figure").Figure(
        figsize=(10, 4.5), layout="constrained"
    )
    panel = figure.subplots()
    names = {"quiet": "no faults", "faulted": "faults", "fixed_group": "fixed group, restarted"}
    for key, points in document["timeline"].items():
        panel.plot(*zip(*points, strict=True), label=names[key], linewidth=1)
    panel.set_xlabel("s")
    panel.set_ylabel("tokens/s")
    panel.set_ylim(bottom=0)
    panel.set_title(
        f"{len(document['faults'])} faults, {document['servers']} expert servers, "
        f"{document['redundancy']} replicas"
    )
    panel.legend()
    figure.savefig(path, dpi=120)
