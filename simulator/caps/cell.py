"""One cell of a comparison: the same requests through several strategies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attention_client.scheduler import RequestQueue, strategy
from simulator.caps.engine import simulate
from simulator.caps.fit import BATCH_SIZE, COST, DOMAINS, RULES, WARM_UP, WINDOW_SIZE
from simulator.caps.metrics import figures
from simulator.caps.workload import RecordedDomains, bursty, poisson

__all__ = ["run_cell"]


def run_cell(
    arrivals: str,
    requests: int,
    rate: float,
    seed: int,
    strategies: Sequence[str],
    routing: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Simulate the cell.

    Args:
        arrivals: `bursty` or `poisson`.
        requests: N.
        routing: Recorded routing traces, one per domain. None: domains are drawn.

    Returns:
        JSON: `figures` in the order of the strategies, `events`, and `seconds` (processor time of the
        simulation).
    """
    domains = DOMAINS if routing is None else RecordedDomains.of(DOMAINS, list(map(Path, routing)))
    make = bursty if arrivals == "bursty" else poisson
    work = make(domains, requests, rate, seed)
    found, events, seconds = [], 0, 0.0
    for name in strategies:
        queue = RequestQueue(
            strategy(name),
            domains.experts,
            batch_size=BATCH_SIZE,
            window_size=WINDOW_SIZE,
            cost=COST,
            seed=seed,
        )
        begin = time.process_time()
        run = simulate(work, queue, COST, RULES)
        seconds += time.process_time() - begin
        events += run.events
        found.append(asdict(figures(run, COST, WARM_UP)))
    return {"figures": found, "events": events, "seconds": seconds}
