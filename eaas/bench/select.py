"""How long one decision of a selection strategy takes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import product
from typing import Any

import numpy as np

from attention_client.scheduler import strategy
from attention_client.scheduler.cost import CostModel, ImbalanceCost, ServerCost
from attention_client.scheduler.strategies import Context
from attention_client.scheduler.strategies.base import FcfsView
from attention_client.scheduler.strategies.registry import DEFAULT

__all__ = ["bench_select"]

_BATCH_SIZE = 8
_DOMAINS = 20
_TOKENS, _TOP_K = 100, 4
_SERVERS = 4
# A step of a server: per active expert and per pair, as fitted to the native kernel with bf16 weights.
_LOAD_S, _PAIR_S = 413e-6, 17.8e-6


def bench_select(
    sizes: Sequence[tuple[int, int]], names: Sequence[str], decisions: int
) -> dict[str, Any]:
    """Measure decisions on windows of requests of several domains.

    Args:
        sizes: Window and experts.
        names: Strategies. The default is measured by expert servers, too, each expert on two of four; and,
            as `unsure`, where it has to know what can be saved, the longest way that it can go.
        decisions: Of each row; after a tenth as many that are not counted.

    Returns:
        JSON: `rows` with window, experts, strategy, cost model, median and 99th percentile.
    """
    rows = []
    for window, experts in sizes:
        rng = np.random.default_rng([window, experts])
        chance_DE = rng.dirichlet(np.full(experts, 0.2), _DOMAINS)
        domain_W = rng.integers(_DOMAINS, size=window)
        window_WE = rng.multinomial(_TOKENS * _TOP_K, chance_DE[domain_W]).astype(np.float64)
        even = ImbalanceCost(base_s=0.04, sensitivity=0.4)
        costs: dict[str, CostModel] = {"imbalance": even, "servers": _servers(experts)}
        for name in names:
            for kind, unsure in product(costs, (False, True)):
                if name == DEFAULT or (kind == "imbalance" and not unsure):
                    p50, p99 = _measure(name, window_WE, costs[kind], unsure, decisions)
                    rows.append(
                        {
                            **{"window": window, "experts": experts, "strategy": name},
                            "cost": kind + ", unsure" * unsure,
                            **{"p50_us": round(p50, 1), "p99_us": round(p99, 1)},
                        }
                    )
    return {"batch_size": _BATCH_SIZE, "decisions": decisions, "rows": rows}


def _measure(
    name: str, window_WE: np.ndarray, cost: CostModel, unsure: bool, decisions: int
) -> tuple[float, float]:
    """Median and 99th percentile, in microseconds."""
    requests = len(window_WE)
    # Nobody is late, so that there is a choice to make; or whether one is depends on what can be saved.
    left_W, wait_W = np.full(requests, 0.079 if unsure else 1e9), np.ones(requests)
    context = Context(cost, None, requests, FcfsView(left_W, wait_W, 0.04, 1.0))
    chosen, rng = strategy(name), np.random.default_rng(0)
    taken_ns = []
    for _ in range(decisions + decisions // 10):
        begin = time.perf_counter_ns()
        chosen.select(window_WE, _BATCH_SIZE, rng, context)
        taken_ns.append(time.perf_counter_ns() - begin)
    p50, p99 = (np.percentile(taken_ns[decisions // 10 :], (50, 99)) / 1e3).tolist()
    return p50, p99


def _servers(experts: int) -> ServerCost:
    """Each expert on two of the servers, in equal shares."""
    shares_SE = np.zeros((_SERVERS, experts))
    for replica in range(2):
        shares_SE[(np.arange(experts) + replica) % _SERVERS, np.arange(experts)] = 0.5
    return ServerCost(shares_SE, fixed_s=0.0, load_s=_LOAD_S, pair_s=_PAIR_S, steps=_TOKENS)
