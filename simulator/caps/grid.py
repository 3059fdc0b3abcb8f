"""Simulates the CAPS paper's comparison: every strategy at every rate, bursty and Poisson arrivals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from itertools import product
from typing import Any

import numpy as np

from simulator.caps.fit import parameters
from simulator.caps.metrics import half_width_95
from simulator.caps.pool import run_cells

__all__ = ["BASELINE", "compare", "rate_key"]

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
    cells = [
        {
            "arrivals": pattern,
            "requests": requests,
            "rate": rate,
            "seed": seed,
            "entries": [(name, "true") for name in names],
            "routing": routing,
        }
        for pattern, rate, seed in product(patterns, rates, seeds)
    ]
    results = run_cells(cells, processes, done)
    document: Document = {
        "config": {
            "requests": requests,
            "seeds": list(seeds),
            "rates": [float(rate) for rate in rates],
            "generated": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S"),
            "parameters": parameters(),
            "routing": list(routing or ()),
            "events": sum(result["events"] for result in results),
            "events_per_s": round(
                sum(result["events"] for result in results)
                / sum(result["seconds"] for result in results)
            ),
        },
        "strategies": sorted(names),
    }
    groups = iter(results)
    for pattern in patterns:
        document[pattern] = {}
        for rate in rates:
            runs = [next(groups)["figures"] for _ in seeds]
            document[pattern][rate_key(rate)] = _rows(names, runs)
    return document


def rate_key(rate: float) -> str:
    """Format a rate of requests per second as a key of the document: 150, 12.5."""
    return repr(float(rate)).removesuffix(".0")


def _rows(names: Sequence[str], runs: Sequence[Sequence[dict[str, float]]]) -> Document:
    rows: Document = {}
    means: dict[str, dict[str, float]] = {}
    for index, name in enumerate(names):
        row: dict[str, float | None] = {}
        means[name] = {}
        for figure in _FIGURES:
            values = [run[index][figure] for run in runs]
            digits = _DIGITS.get(figure, 2)
            means[name][figure] = float(np.mean(values))
            row[f"{figure}_mean"] = round(means[name][figure], digits)
            row[f"{figure}_std"] = round(
                float(np.std(values, ddof=min(1, len(values) - 1))), digits
            )
            half = half_width_95(values)
            row[f"{figure}_ci95"] = None if half is None else round(half, digits)
        rows[name] = row
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
