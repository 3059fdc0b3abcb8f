"""Simulates the CAPS paper's comparison: every strategy at every rate, bursty and Poisson arrivals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import product
from typing import Any

import numpy as np

from simulator.caps.cells import run_groups
from simulator.caps.fit import parameters
from simulator.caps.metrics import half_width_95

__all__ = ["BASELINE", "compare"]

BASELINE = "fcfs"
_FIGURES = ("p50", "p90", "p99", "throughput", "imbalance")
# Decimal places of figures, as in the paper.
_DIGITS = {"imbalance": 3}

Document = dict[str, Any]


def compare(
    requests: int,
    seeds: Sequence[int],
    rates: Sequence[float],
    patterns: Sequence[str],
    strategies: Sequence[str],
    processes: int,
    done: Callable[[], None],
    routing: Sequence[str] | None = None,
) -> Document:
    """Simulate the grid of patterns, rates and seeds with all strategies, for `eaas simulate caps`.

    Args:
        patterns: `bursty`, `poisson` or both.
        strategies: Names; the baseline is added if missing.
        done: Called after each of len(patterns) x len(rates) x len(seeds) cells.
        routing: See `run_cell`.

    Returns:
        A document in the format of the paper's `results.json`: `[pattern][rate][strategy]` with means and
        standard deviations over the seeds (latencies in ms, throughput in requests/s), and
        `[pattern][rate]["_improvements"][strategy]` against the baseline. In addition it has half-widths of
        95 % confidence intervals, and in `config` the fitted parameters and the simulator's speed.
    """
    names = list(dict.fromkeys([*strategies, BASELINE]))
    places = list(product(patterns, rates))
    groups = [
        {
            "arrivals": pattern,
            "requests": requests,
            "rate": rate,
            "entries": [(name, "true") for name in names],
            "routing": routing,
        }
        for pattern, rate in places
    ]
    results = run_groups(groups, seeds, processes, done)
    cells = [cell for group in results for cell in group]
    events = sum(cell["events"] for cell in cells)
    document: Document = {
        "config": {
            "requests": requests,
            "seeds": list(seeds),
            "rates": [float(rate) for rate in rates],
            "generated": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S"),
            "parameters": parameters(),
            "routing": list(routing or ()),
            "events": events,
            "events_per_s": round(events / sum(cell["seconds"] for cell in cells)),
        },
        "strategies": sorted(names),
        **{pattern: {} for pattern in patterns},
    }
    for (pattern, rate), group in zip(places, results, strict=True):
        # 150, 12.5
        key = repr(float(rate)).removesuffix(".0")
        document[pattern][key] = _rows(names, [cell["figures"] for cell in group])
    return document


def _rows(names: Sequence[str], runs: Sequence[Sequence[dict[str, float]]]) -> Document:
    rows: Document = {}
    means: dict[str, dict[str, float]] = {}
    for index, name in enumerate(names):
        rows[name], means[name] = {}, {}
        for figure in _FIGURES:
            values = [run[index][figure] for run in runs]
            digits = _DIGITS.get(figure, 2)
            spread, half = (
                float(np.std(values, ddof=min(1, len(values) - 1))),
                half_width_95(values),
            )
            means[name][figure] = float(np.mean(values))
            rows[name][f"{figure}_mean"] = round(means[name][figure], digits)
            rows[name][f"{figure}_std"] = round(spread, digits)
            rows[name][f"{figure}_ci95"] = None if half is None else round(half, digits)
    base = means[BASELINE]
    rows["_improvements"] = {
        name: {
            "p99_reduction_pct": round(100 * (1 - mean["p99"] / base["p99"]), 1),
            "throughput_gain_pct": round(100 * (mean["throughput"] / base["throughput"] - 1), 1),
            "imbalance_reduction_pct": round(100 * (1 - mean["imbalance"] / base["imbalance"]), 1),
        }
        for name, mean in means.items()
        if name != BASELINE
    }
    return rows
