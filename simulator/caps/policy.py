"""Simulates whether a batch-selection strategy can be always on: cost in calm, gain under overload.

The strategy is compared with first-come-first-served, the control `random`, and greedy variance. Strategies
that use loads also run with a perfect predictor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from simulator.caps.cells import run_groups
from simulator.caps.fit import parameters
from simulator.caps.grid import BASELINE
from simulator.caps.metrics import half_width_95
from simulator.caps.workload import PATTERNS

__all__ = ["CONTROL", "GREEDY", "PERFECT", "Trial", "judge"]

GREEDY = "greedy_variance"
CONTROL = "random"
# Suffix for the name of a strategy that is given the true loads.
PERFECT = ", perfect predictor"
# Requests per second at which requests always wait, to measure the capacity.
_FLOOD = 1e5

Document = dict[str, Any]


@dataclass(frozen=True)
class Trial:
    """What a strategy is judged by.

    Attributes:
        requests: Number of requests in a run without a trace.
        seeds: One run for each.
        loads: Loads below 1, for all arrivals.
        overloads: Loads above 1, for bursty and Poisson arrivals.
        traces: Files of arrivals; each runs with requests clustered by domain, and with independent ones.
        predicted_pairs: See `draw_workload`.
        step_us, servers: See `run_cell`.
    """

    strategy: str
    requests: int
    seeds: Sequence[int]
    loads: Sequence[float]
    overloads: Sequence[float]
    traces: Sequence[Path] = ()
    predicted_pairs: int = 40
    step_us: Sequence[float] | None = None
    servers: int = 1

    @property
    def groups(self) -> list[tuple[str, Path | None, float]]:
        """Pattern, trace and load of each row."""
        calm_and_over = (*self.loads, *self.overloads)
        return [(pattern, None, load) for pattern in PATTERNS for load in calm_and_over] + [
            (pattern, trace, load)
            for trace in self.traces
            for pattern in PATTERNS
            for load in self.loads
        ]

    @property
    def cells(self) -> int:
        """Number of cells that `judge` runs, for a progress bar; not those that find the capacity."""
        return len(self.groups) * len(self.seeds)


def judge(trial: Trial, processes: int, done: Callable[[], None]) -> Document:
    """Simulate a strategy at each load, a share of first-come-first-served's capacity, for a verdict.

    Args:
        processes: See `run_groups`.
        done: Called after each cell.

    Returns:
        JSON: `config`; `rows`, each with arrivals, load, FCFS's P99 in ms and the P99 reductions against it
        in %, means over the seeds, with half-widths of 95 % confidence intervals; and `verdict`, for
        predicted and for true loads: the worst row in calm, the least share of greedy's gain under overload,
        and the correlation of predicted and true loads.
    """
    name, told = trial.strategy, ("predicted", "true")
    entries = [(BASELINE, "true"), (CONTROL, "true"), *product((GREEDY, name), told)]
    labels = [
        entry + (PERFECT if told == "true" and entry != CONTROL else "") for entry, told in entries
    ]
    capacity = {pattern: _capacity(trial, pattern) for pattern in PATTERNS}
    results = run_groups(
        [
            _cell(trial, pattern, load * capacity[pattern], entries)
            | {
                "trace": None if trace is None else str(trace),
                "predicted_pairs": trial.predicted_pairs,
            }
            for pattern, trace, load in trial.groups
        ],
        trial.seeds,
        processes,
        done,
    )
    rows = []
    for (pattern, trace, load), runs in zip(trial.groups, results, strict=True):
        p99_NA = np.array([[figures["p99"] for figures in run["figures"]] for run in runs])
        rows.append(
            {
                "arrivals": pattern if trace is None else trace.name,
                "clustered": pattern == "bursty",
                "load": load,
                "fcfs_p99_ms": round(float(p99_NA[:, 0].mean()), 1),
                **_reductions(labels[1:], p99_NA),
            }
        )
    correlations = [run["correlation"] for runs in results for run in runs]
    return {
        "config": {
            "strategy": name,
            "requests": trial.requests,
            "seeds": list(trial.seeds),
            "predicted_pairs": trial.predicted_pairs,
            "step_us": trial.step_us,
            "servers": trial.servers,
            "capacity_per_s": {pattern: round(rate, 1) for pattern, rate in capacity.items()},
            "parameters": parameters(),
        },
        "rows": rows,
        "verdict": _verdict(name, rows, float(np.mean(correlations))),
    }


def _cell(trial: Trial, pattern: str, rate: float, entries: Sequence[tuple[str, str]]) -> Document:
    return {
        "arrivals": pattern,
        "requests": trial.requests,
        "rate": rate,
        "entries": entries,
        "step_us": trial.step_us,
        "servers": trial.servers,
    }


def _capacity(trial: Trial, pattern: str) -> float:
    """Simulate how many requests per second first-come-first-served finishes if requests always wait."""
    flood = _cell(trial, pattern, _FLOOD, [(BASELINE, "true")])
    (runs,) = run_groups([flood], trial.seeds, processes=1)
    return float(np.mean([run["figures"][0]["throughput"] for run in runs]))


def _reductions(labels: Sequence[str], p99_NA: npt.NDArray[np.float64]) -> Document:
    """Compute P99 reductions of alternatives against the first, from means over N seeds, with half-widths."""
    base_N = p99_NA[:, 0]
    reductions, halves = {}, {}
    for label, value_N in zip(labels, p99_NA[:, 1:].T, strict=True):
        ratio = value_N.mean() / base_N.mean()
        reductions[label] = round(100 * float(1 - ratio), 1)
        # Ratio of means, by the delta method.
        half = half_width_95(((value_N - ratio * base_N) / base_N.mean()).tolist())
        halves[label] = None if half is None else round(100 * half, 1)
    return {"p99_reduction_pct": reductions, "p99_reduction_ci95_pct": halves}


def _verdict(name: str, rows: Sequence[Document], correlation: float) -> Document:
    """Compute the figures that decide whether a strategy may be always on, for both predictors."""

    def worst(label: str) -> Document:
        row = min(
            (row for row in rows if row["load"] < 1),
            key=lambda row: row["p99_reduction_pct"][label],
        )
        return {
            "p99_reduction_pct": row["p99_reduction_pct"][label],
            "p99_reduction_ci95_pct": row["p99_reduction_ci95_pct"][label],
            **{key: row[key] for key in ("arrivals", "clustered", "load")},
        }

    def share(label: str, greedy: str) -> dict[str, float]:
        least: dict[str, float] = {}
        for row in rows:
            gain = row["p99_reduction_pct"]
            if row["load"] > 1 and gain[greedy] > 0:
                here = round(100 * gain[label] / gain[greedy], 1)
                least[row["arrivals"]] = min(here, least.get(row["arrivals"], here))
        return least

    return {
        "worst_in_calm": {"predicted": worst(name), "perfect": worst(name + PERFECT)},
        "share_of_greedy_gain_pct": {
            "predicted": share(name, GREEDY),
            "perfect": share(name + PERFECT, GREEDY + PERFECT),
        },
        "predictor_correlation": round(correlation, 3),
    }
