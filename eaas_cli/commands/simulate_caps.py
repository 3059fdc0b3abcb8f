"""`eaas simulate caps`: compare the strategies that choose which waiting requests run together."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from eaas_cli.bench.command import show
from eaas_cli.commands.options import Json, Plot
from eaas_cli.console import print_table, progress

__all__ = ["caps"]


_PATTERNS = ("bursty", "poisson")


def caps(
    requests: Annotated[int, typer.Option(min=1, help="Requests of a run.")] = 3000,
    seeds: Annotated[
        str, typer.Option(metavar="N,...", help="One run for each.")
    ] = "42,123,456,789",
    rates: Annotated[
        str, typer.Option(metavar="R,...", help="Requests per second.")
    ] = "150,200,250,300",
    pattern: Annotated[
        Literal["bursty", "poisson", "both"],
        typer.Option(help="Arrivals: bursts of one domain each, or independent."),
    ] = "both",
    strategies: Annotated[
        str | None,
        typer.Option(
            metavar="NAME,...", help="Strategies; fcfs is always included.", show_default="all"
        ),
    ] = None,
    routing: Annotated[
        str | None,
        typer.Option(
            metavar="TRACE,...",
            help="Recorded routing traces, one per domain.",
            show_default="20 synthetic domains",
        ),
    ] = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Compare batch selection strategies under load, with the execution model of CAPS."""
    from attention_client.scheduler import strategy, strategy_names
    from eaas.cores import usable_cores
    from eaas_cli.option_values import numbers, once, positive_numbers, words
    from eaas_cli.plot import check_plot
    from simulator.caps.fit import DOMAINS
    from simulator.caps.grid import compare
    from simulator.caps.workload import RecordedDomains

    names = strategy_names() if strategies is None else words(strategies)
    for name in names:
        strategy(name)  # raises before anything runs
    seed_list = once(numbers("--seeds", seeds, least=0))
    rate_list = once(positive_numbers("--rates", rates))
    patterns = _PATTERNS if pattern == "both" else (pattern,)
    traces = [word.strip() for word in routing.split(",")] if routing else None
    if traces:
        RecordedDomains.of(DOMAINS, [Path(path) for path in traces])  # raises before anything runs
    if plot is not None:
        check_plot(plot)
    with progress("simulating", len(patterns) * len(rate_list) * len(seed_list)) as done:
        document = compare(
            requests, seed_list, rate_list, patterns, names, usable_cores(), done, traces
        )
    if plot is not None:
        _draw(document, plot)
    show(document, as_json, _print)


def _draw(document: dict[str, Any], path: Path) -> None:
    """Draw the P99 by rate with its 95 % confidence: a panel for each pattern, a line for each strategy."""
    from eaas_cli.plot import Line, draw_plot

    panels: dict[str, list[Line]] = {}
    for pattern in (p for p in _PATTERNS if p in document):
        rates = list(document[pattern])
        panels[pattern] = []
        for name in document["strategies"]:
            rows = [document[pattern][rate][name] for rate in rates]
            p99_ms, half_ms = (
                [row[key] or 0.0 for row in rows] for key in ("p99_mean", "p99_ci95")
            )
            panels[pattern].append(Line(name, [float(rate) for rate in rates], p99_ms, half_ms))
    draw_plot(path, panels, "requests/s", "P99 latency, ms")


def _print(document: dict[str, Any]) -> None:
    for pattern in _PATTERNS:
        if pattern in document:
            _print_pattern(document, pattern)
    config = document["config"]
    seeds = ", ".join(map(str, config["seeds"]))
    print(f"means of seeds {seeds}, {config['requests']} requests each")
    print(f"{config['events_per_s']:,} events/s on a core")
    print("the workload's and the execution model's parameters are fitted: docs/scheduling.md")


def _print_pattern(document: dict[str, Any], pattern: str) -> None:
    """Print one pattern: P99 at each rate, relative to the baseline; other figures at the highest rate."""
    from simulator.caps.grid import BASELINE

    rates = list(document[pattern])
    columns = ("", *(f"{rate}/s" for rate in rates), f"req/s at {rates[-1]}/s", "imbalance")
    rows = []
    for name in (BASELINE, *(name for name in document["strategies"] if name != BASELINE)):
        cells = []
        for rate in rates:
            gain = document[pattern][rate]["_improvements"].get(name)
            p99_ms = document[pattern][rate][name]["p99_mean"]
            # `0.0 -` avoids showing -0.0.
            cells.append(
                f"{0.0 - gain['p99_reduction_pct']:+.1f} %" if gain else f"{p99_ms:.0f} ms"
            )
        last = document[pattern][rates[-1]][name]
        rest = f"{last['throughput_mean']:.1f}", f"{last['imbalance_mean']:.3f}"
        rows.append((name, *cells, *rest))
    print_table(columns, rows, title=f"{pattern}: P99 by rate")
