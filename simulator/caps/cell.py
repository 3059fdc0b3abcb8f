"""Simulates one cell of a comparison of batch-selection strategies: the same requests under each."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from attention_client.scheduler import RequestQueue, strategy
from eaas.errors import ConfigError
from simulator.autoscaling.traffic import read_arrivals
from simulator.caps.cost import CostModel, ServerCost
from simulator.caps.engine import simulate
from simulator.caps.fit import BATCH_SIZE, COST, DOMAINS, RULES, WARM_UP, WINDOW_SIZE
from simulator.caps.metrics import figures
from simulator.caps.workload import Domains, RecordedDomains, Workload, bursty, from_times, poisson

__all__ = ["run_cell"]


def run_cell(
    arrivals: str,
    requests: int,
    rate: float,
    seed: int,
    entries: Sequence[tuple[str, str]],
    trace: str | None = None,
    predicted_pairs: int | None = None,
    step_us: Sequence[float] | None = None,
    servers: int = 1,
    routing: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Simulate one cell: the same requests under each strategy. `pool` runs several in worker processes.

    Args:
        arrivals: `bursty` or `poisson`; with a trace, requests clustered by domain, or not.
        requests: N; ignored with a trace.
        entries: For each run a strategy and the loads it is given: `predicted` or `true`.
        trace: File with the times of arrivals.
        predicted_pairs: See `bursty`.
        step_us: Fixed, load and pair time of an expert server's step, in microseconds (`ServerCost`). None:
            the paper's execution model.
        servers: Number of servers that share the experts evenly.
        routing: Recorded routing traces, one per domain. None: domains are drawn at random.

    Returns:
        JSON: `figures` in the order of the entries, `events`, `seconds` (processor time of the simulation),
        and `correlation` of predicted and true loads, mean over requests.
    """
    domains = DOMAINS if routing is None else RecordedDomains.of(DOMAINS, list(map(Path, routing)))
    if trace is not None:
        times_s = read_arrivals(Path(trace))
        work = from_times(
            domains, times_s, rate, seed, predicted_pairs, clustered=arrivals == "bursty"
        )
    else:
        make = bursty if arrivals == "bursty" else poisson
        work = make(domains, requests, rate, seed, predicted_pairs)
    cost = COST if step_us is None else _server_cost(domains, step_us, servers)
    return _run(work, seed, entries, cost) | {"correlation": _correlation(work)}


def _server_cost(domains: Domains, step_us: Sequence[float], servers: int) -> ServerCost:
    """Make the execution model of expert servers. Raises ConfigError for more servers than experts."""
    if servers > domains.experts:
        raise ConfigError(f"{servers} servers: more than the {domains.experts} experts")
    fixed_s, load_s, pair_s = (value / 1e6 for value in step_us)
    return ServerCost(servers, fixed_s, load_s, pair_s, steps=domains.tokens)


def _run(
    work: Workload, seed: int, entries: Sequence[tuple[str, str]], cost: CostModel
) -> dict[str, Any]:
    known = Workload(work.arrival_s, work.load_NE, work.load_NE)
    found, events, seconds = [], 0, 0.0
    for name, told in entries:
        queue = RequestQueue(
            strategy(name),
            batch_size=BATCH_SIZE,
            window_size=WINDOW_SIZE,
            seed=seed,
        )
        begin = time.process_time()
        run = simulate(known if told == "true" else work, queue, cost, RULES)
        seconds += time.process_time() - begin
        events += run.events
        found.append(asdict(figures(run, cost, WARM_UP)))
    return {"figures": found, "events": events, "seconds": seconds}


def _correlation(work: Workload) -> float:
    a_NE = work.load_NE - work.load_NE.mean(axis=1, keepdims=True)
    b_NE = work.predicted_NE - work.predicted_NE.mean(axis=1, keepdims=True)
    products = (a_NE * b_NE).sum(axis=1)
    return float(np.mean(products / np.sqrt((a_NE**2).sum(axis=1) * (b_NE**2).sum(axis=1))))
