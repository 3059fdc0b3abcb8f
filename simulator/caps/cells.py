"""Simulates the cells of a comparison of batch-selection strategies: the same requests under each strategy.

A cell has one seed; a group is a cell for each seed. Cells run in worker processes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from attention_client.scheduler import RequestQueue, strategy
from eaas.errors import ConfigError, EaasError
from simulator.autoscaling.traffic import read_traffic
from simulator.caps.cost import ServerCost
from simulator.caps.engine import simulate
from simulator.caps.fit import BATCH_SIZE, COST, DOMAINS, RULES, WARM_UP, WINDOW_SIZE
from simulator.caps.metrics import figures
from simulator.caps.workload import Domains, RecordedDomains, Workload, draw_workload

__all__ = ["run_cell", "run_groups"]


def run_groups(
    groups: Sequence[dict[str, Any]],
    seeds: Sequence[int],
    processes: int,
    done: Callable[[], None] = lambda: None,
) -> list[list[dict[str, Any]]]:
    """Run groups of cells in parallel; return for each group the results by seed.

    Args:
        groups: Arguments of `run_cell`, without the seed.
        processes: Number of cells that run at a time; with 1 they run in this process.
        done: Called after each cell.

    Raises:
        ConfigError: See `run_cell`.
        EaasError: A worker process ended.
    """
    cells = [group | {"seed": seed} for group in groups for seed in seeds]
    results = []
    if min(processes, len(cells)) <= 1:
        for cell in cells:
            results.append(run_cell(**cell))
            done()
    else:
        results = _in_workers(cells, min(processes, len(cells)), done)
    return [results[at : at + len(seeds)] for at in range(0, len(cells), len(seeds))]


def _in_workers(
    cells: Sequence[dict[str, Any]], processes: int, done: Callable[[], None]
) -> list[dict[str, Any]]:
    # Workers are spawned, because a fork would copy the threads' locks of this process.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, initializer=_end_with_parent)
    try:
        futures = [pool.submit(run_cell, **cell) for cell in cells]
        for future in as_completed(futures):
            future.result()
            done()
        return [future.result() for future in futures]
    except BrokenProcessPool as error:
        raise EaasError("a worker process of the simulation ended") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """In each worker: leave Ctrl-C to the parent, and exit when it dies: a killed one stops no worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


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
    """Simulate one cell: the same requests under each strategy.

    Args:
        arrivals: One of `PATTERNS`; see `draw_workload`.
        requests: N; ignored with a trace.
        entries: For each run a strategy and the loads it is given: `predicted` or `true`.
        trace: File with the times of arrivals.
        predicted_pairs: See `draw_workload`.
        step_us: Fixed, load and pair time of an expert server's step, in microseconds (`ServerCost`). None:
            the paper's execution model.
        servers: Number of servers that share the experts evenly.
        routing: Recorded routing traces, one per domain. None: domains are drawn at random.

    Returns:
        JSON: `figures` in the order of the entries, `events`, `seconds` (processor time of the simulation),
        and `correlation` of predicted and true loads, mean over requests.

    Raises:
        ConfigError: More servers than experts, or an unknown strategy.
    """
    domains = DOMAINS if routing is None else RecordedDomains.of(DOMAINS, list(map(Path, routing)))
    times_s = None if trace is None else read_traffic(Path(trace)).arrival_s_R
    work = draw_workload(domains, arrivals, requests, rate, seed, predicted_pairs, times_s=times_s)
    known = Workload(work.arrival_s, work.load_NE, work.load_NE)
    cost = COST if step_us is None else _server_cost(domains, step_us, servers)
    found, events, seconds = [], 0, 0.0
    for name, told in entries:
        queue = RequestQueue(
            strategy(name), batch_size=BATCH_SIZE, window_size=WINDOW_SIZE, seed=seed
        )
        begin = time.process_time()
        run = simulate(known if told == "true" else work, queue, cost, RULES)
        seconds += time.process_time() - begin
        events += run.events
        found.append(figures(run, cost, WARM_UP))
    return {
        "figures": found,
        "events": events,
        "seconds": seconds,
        "correlation": _correlation(work),
    }


def _server_cost(domains: Domains, step_us: Sequence[float], servers: int) -> ServerCost:
    if servers > domains.experts:
        raise ConfigError(f"{servers} servers: more than the {domains.experts} experts")
    fixed_s, load_s, pair_s = (value / 1e6 for value in step_us)
    return ServerCost(servers, fixed_s, load_s, pair_s, steps=domains.tokens)


def _correlation(work: Workload) -> float:
    a_NE = work.load_NE - work.load_NE.mean(axis=1, keepdims=True)
    b_NE = work.predicted_NE - work.predicted_NE.mean(axis=1, keepdims=True)
    products = (a_NE * b_NE).sum(axis=1)
    return float(np.mean(products / np.sqrt((a_NE**2).sum(axis=1) * (b_NE**2).sum(axis=1))))
