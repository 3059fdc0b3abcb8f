"""Tables of `eaas trace info` and `eaas trace compare`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from rich.table import Table

from eaas_cli.commands.console import table_console

if TYPE_CHECKING:
    from simulator import Comparison

__all__ = ["print_comparison", "print_summary"]


def print_comparison(comparison: Comparison) -> None:
    """Print a row per replay."""
    table = Table(box=None)
    table.add_column("policy")
    for column in (
        *("servers", "slots", "interval", "PAR mean", "PAR p99", "transit"),
        *("moved", "plans", "plan", "time", "score"),
    ):
        table.add_column(column, justify="right")
    for run in comparison.replays:
        table.add_row(
            run.policy,
            str(run.servers),
            str(run.slots),
            str(run.interval) if run.plans else "-",
            f"{run.par_mean:.4f}",
            f"{run.par_p99:.4f}",
            f"{run.transit:,}",
            f"{run.bytes_moved / 1e9:,.0f} GB",
            str(run.plans),
            f"{1e3 * run.plan_s:.1f} ms" if run.plans else "-",
            f"{run.time_s:.1f} s",
            f"{comparison.score(run):.2f}",
        )
    table_console().print(table)
    print(
        "PAR: busiest server over the mean; transit: loaded replicas; plan: time on this machine; "
        "score 100: EPLB every 1,024 iterations"
    )
    if not all(baseline.plans for baseline in comparison.baselines.values()):
        print("The trace ends before EPLB's first plan: score 100 is the layout at the start.")


def print_summary(document: dict[str, Any]) -> None:
    """Print a summary (`simulator.traces.summary`), and the comparison with published figures."""
    table = Table(box=None, show_header=False)
    for name, value in document.items():
        if name not in ("notes", "against"):
            shown = f"{value:,.4g}" if isinstance(value, float) else f"{value:,}"
            table.add_row(name.replace("_", " "), shown)
    for name, value in document["notes"].items():
        shown = value if isinstance(value, str) else json.dumps(value)
        table.add_row(f"note: {name}", shown)
    table_console().print(table)
    if "against" in document:
        _print_against(document["against"])


def _print_against(against: dict[str, Any]) -> None:
    table = Table(box=None)
    for column in ("servers", "interval", "PAR", "published", "off", "transit", "published "):
        table.add_column(column, justify="right")
    for row in against["rows"]:
        table.add_row(
            str(row["servers"]),
            "none" if row["interval"] is None else str(row["interval"]),
            f"{row['par']:.4f}",
            f"{row['published_par']:.4f}",
            f"{100 * row['off']:+.1f} %",
            f"{row['transit']:,}",
            f"{row['published_transit']:,}",
        )
    table_console().print(table)
    print(
        f"PAR is off {against['dataset']} by {100 * against['mean_off']:.1f} % on average, "
        f"{100 * against['worst_off']:.1f} % at worst"
    )
