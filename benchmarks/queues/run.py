"""Runs the situations, and prints the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import balancer.policies
from benchmarks.queues.world import KNOWLEDGE, Guests, Situation, simulate
from eaas_cli.console import print_table
from simulator.traces import generate_trace

__all__ = ["SITUATIONS", "bench_queues", "print_report"]

_HALF_BUSY = Guests(4, every_s=6e-3, takes_s=3e-3)
SITUATIONS = (
    Situation("8 clients", 8, 2e-3),
    Situation("4 clients that compute longer", 4, 4e-3),
    Situation("8 clients, 2 servers half as fast", 8, 1e-3, slow=(2.0, 2.0)),
    Situation("8 clients, 4 servers half busy for others", 8, 2e-3, guests=_HALF_BUSY),
    Situation("2 clients, 4 servers half busy for others", 2, 2e-3, guests=_HALF_BUSY),
)
_LAYERS, _EXPERTS = 6, 256
# Iterations to plan from, and to draw calls from.
_WINDOW, _AHEAD = 256, 64


def bench_queues(
    servers: int, tokens: int, calls: int, seeds: int, *, say: Callable[[str], None]
) -> dict[str, Any]:
    """Simulate every situation with each kind of knowledge, on a trace that drifts.

    Args:
        servers: Expert servers; each has one redundant slot per layer.
        tokens: Of a layer call.
        calls: Layer calls per run.
        seeds: Runs with other random numbers.
        say: Told what begins.
    """
    trace = generate_trace(
        "drift", iterations=_WINDOW + _AHEAD, layers=_LAYERS, experts=_EXPERTS, seed=0
    )
    counts_ILE = trace.counts_ILE
    plan = balancer.policies.plan(
        "fractional", counts_ILE[:_WINDOW].sum(axis=0).astype(float), servers, _EXPERTS + servers
    )
    shares_LSE = plan.shares_LSE.astype(np.float32)
    rows = []
    for situation in SITUATIONS:
        say(situation.name)
        for knowledge in KNOWLEDGE:
            runs = [
                simulate(
                    situation, knowledge, counts_ILE[_WINDOW:], shares_LSE,
                    tokens=tokens, calls=calls, seed=seed,
                )
                for seed in range(seeds)
            ]  # fmt: skip
            took = np.concatenate(runs)
            rows.append(
                {
                    "situation": situation.name,
                    "knows": knowledge,
                    "mean_ms": float(took.mean() * 1e3),
                    "p99_ms": float(np.percentile(took, 99) * 1e3),
                }
            )
    return {"servers": servers, "tokens": tokens, "rows": rows}


def print_report(document: dict[str, Any]) -> None:
    """Print a row per situation and knowledge; ratios to `times`, which counts others' work as one's own."""
    rows: Sequence[dict[str, Any]] = document["rows"]
    base = {row["situation"]: row for row in rows if row["knows"] == "times"}
    print_table(
        ("situation", "a client knows", "mean ms", "p99", "to times", "p99"),
        [
            (
                row["situation"], row["knows"], f"{row['mean_ms']:.1f}", f"{row['p99_ms']:.1f}",
                *(f"{row[of] / base[row['situation']][of]:.2f}" for of in ("mean_ms", "p99_ms")),
            )
            for row in rows
        ],
    )  # fmt: skip
    print("times of layer calls; a server reads an expert's weights in 0.1 ms")
    for name, meaning in KNOWLEDGE.items():
        print(f"{name}: {meaning}")
