"""Tables for a person."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from simulator.caps.grid import BASELINE
from simulator.caps.policy import PERFECT
from simulator.caps.workload import PATTERNS

__all__ = ["print_comparison", "print_fits", "print_judgement"]


def print_comparison(document: dict[str, Any]) -> None:
    """Print a table for each pattern, with a line for each strategy."""
    console = Console()
    for pattern in PATTERNS:
        if pattern in document:
            console.print(_table(document, pattern))
    config = document["config"]
    seeds = ", ".join(map(str, config["seeds"]))
    print(f"means of seeds {seeds}, {config['requests']} requests each")
    print(f"{config['events_per_s']:,} events/s on a core")
    print("the workload's and the execution model's parameters are fitted: docs/scheduling.md")


def _table(document: dict[str, Any], pattern: str) -> Table:
    """P99 at each rate, relative to the baseline; other figures at the highest rate."""
    rates = list(document[pattern])
    table = Table(box=None, title=f"{pattern}: P99 by rate", title_justify="left")
    table.add_column("")
    for rate in (f"{rate}/s" for rate in rates):
        table.add_column(rate, justify="right")
    table.add_column(f"req/s at {rates[-1]}/s", justify="right")
    table.add_column("imbalance", justify="right")
    order = [BASELINE, *(name for name in document["strategies"] if name != BASELINE)]
    for name in order:
        cells = []
        for rate in rates:
            gain = document[pattern][rate]["_improvements"].get(name)
            p99_ms = document[pattern][rate][name]["p99_mean"]
            cells.append(_change(gain["p99_reduction_pct"]) if gain else f"{p99_ms:.0f} ms")
        last = document[pattern][rates[-1]][name]
        rest = f"{last['throughput_mean']:.1f}", f"{last['imbalance_mean']:.3f}"
        table.add_row(name, *cells, *rest)
    return table


def _change(reduction_pct: float) -> str:
    """A reduction as a change; `0.0 -` avoids showing -0.0."""
    return f"{0.0 - reduction_pct:+.1f} %"


def print_judgement(document: dict[str, Any]) -> None:
    """Print a line for each pattern and load, then the verdict."""
    console = Console()
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in document["rows"]:
        kind = "clusters" if row["clustered"] else "independent"
        named = row["arrivals"] if row["arrivals"] in PATTERNS else f"{row['arrivals']}, {kind}"
        groups.setdefault(named, []).append(row)
    for named, rows in groups.items():
        labels = list(rows[0]["p99_reduction_pct"])
        table = Table(box=None, title=named, title_justify="left")
        heads = ("(perfect)" if label.endswith(PERFECT) else label for label in labels)
        for column in ("load", "FCFS P99", *heads):
            table.add_column(column, justify="right", no_wrap=True)
        for row in rows:
            changes = (_change(row["p99_reduction_pct"][label]) for label in labels)
            table.add_row(f"{row['load']:g}", f"{row['fcfs_p99_ms']:.0f} ms", *changes)
        console.print(table)
    print("P99 against FCFS, less is better; (perfect): with the true loads")
    verdict = document["verdict"]
    for told, worst in verdict["worst_in_calm"].items():
        share = verdict["share_of_greedy_gain_pct"][told]
        gains = ", ".join(f"{arrivals} {value:.0f} %" for arrivals, value in share.items())
        half = worst["p99_reduction_ci95_pct"]
        sure = "" if half is None else f" (95 %: {half:.1f} more or less)"
        print(
            f"{told}: at worst {_change(worst['p99_reduction_pct'])}{sure} in calm "
            f"({worst['arrivals']}, load {worst['load']:g}); "
            f"of greedy's gain under overload at least: {gains or 'it has none'}"
        )
    print(f"correlation of the prediction with the truth: {verdict['predictor_correlation']}")


def print_fits(document: list[dict[str, Any]]) -> None:
    """Print a line for each fit."""
    table = Table(box=None)
    for column in document[0]:
        table.add_column(column)
    for row in document:
        table.add_row(*(str(value) for value in row.values()))
    Console().print(table)
