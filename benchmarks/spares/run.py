"""The measurement of `python -m benchmarks.spares`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from balancer.policies.spares import choose_spares
from balancer.policies.split import levels
from benchmarks.spares.predictors import PREDICTORS
from simulator.placement.planners import first_layout
from simulator.placement.sparing import Serving, last_loads, replay_spares
from simulator.placement.splitting import split_par
from simulator.traces import Trace

__all__ = ["TRANSFERS", "bench_spares"]

TRANSFERS = (0.0, 1.0, 4.0, 16.0, 64.0, 256.0, 1024.0)
"""Transfer times of an expert, in times of a layer."""

_SAMPLES = 400


def bench_spares(trace: Trace, servers: int, *, say: Callable[[str], None]) -> dict[str, Any]:
    """Compare predictors and transfer times on one trace, from contiguous experts without plans.

    Returns:
        The JSON document: mean PAR `none` without spare slots, and `best` with those that are chosen anew for
        each batch, knowing it (of some calls); `predictors` and `transfers`, each with `par`, `p99` and
        `loads`, per layer and iteration, transfers taking no time for the first; and `plan_us`, the median
        time of a choice.
    """
    counts_ILE = trace.counts_ILE
    layout = first_layout(1, servers, trace.experts)
    servings = [Serving(layer, 0, trace.iterations, layout) for layer in range(trace.layers)]
    shares_SE = layout.shares_LSE[0]
    none = [split_par(counts_ILE[:, layer], shares_SE).mean() for layer in range(trace.layers)]

    def row(name: Any, **given: Any) -> dict[str, Any]:
        say(f"{name}")
        run = replay_spares(counts_ILE, servings, **{"transfer_s": 0.0, **given})
        return {
            "name": name,
            "par": float(run.par_IL.mean()),
            "p99": float(np.percentile(run.par_IL, 99)),
            "loads": float(run.loads_IL.mean()),
        }

    return {
        "servers": servers,
        "shape": counts_ILE.shape,
        "none": float(np.mean(none)),
        "best": _best(counts_ILE, servers),
        "predictors": [row(name, predict=make(counts_ILE)) for name, make in PREDICTORS.items()],
        "transfers": [
            row(times, transfer_s=times, iteration_s=float(trace.layers)) for times in TRANSFERS
        ],
        "plan_us": _plan_us(counts_ILE, servers),
    }


def _samples(counts_ILE: npt.NDArray[Any]) -> list[tuple[int, int]]:
    calls = np.arange(1, counts_ILE.shape[0] * counts_ILE.shape[1])
    chosen = np.random.default_rng(0).choice(calls, min(_SAMPLES, len(calls)), replace=False)
    return [divmod(int(call), counts_ILE.shape[1]) for call in chosen]


def _best(counts_ILE: npt.NDArray[Any], servers: int) -> float:
    """Mean PAR if spare replicas are chosen anew for each batch, knowing it."""
    layout = first_layout(1, servers, counts_ILE.shape[2])
    pars = []
    for i, layer in _samples(counts_ILE):
        load_1E = counts_ILE[i : i + 1, layer].astype(np.float64)
        spare_S = choose_spares(load_1E, layout, np.full(servers, -1), least=0.0)
        shares_SE = layout.dense()[1][0]
        server_N = np.flatnonzero(spare_S >= 0)
        shares_SE[server_N, spare_S[server_N]] = 1.0
        if load_1E.any():
            pars.append(levels(load_1E, shares_SE)[0] / load_1E.sum() * servers)
    return float(np.mean(pars)) if pars else 1.0


def _plan_us(counts_ILE: npt.NDArray[Any], servers: int) -> float:
    """Median time of a choice for the last loads, from a choice for loads two iterations before."""
    layout, predict = first_layout(1, servers, counts_ILE.shape[2]), last_loads(counts_ILE)
    spent = []
    for i, layer in _samples(counts_ILE):
        held_S = np.full(servers, -1, np.int32)
        for calls in (max(1, i - 1), i + 1):
            load_BE = predict(calls, layer)
            assert load_BE is not None
            begin = time.perf_counter()
            held_S = choose_spares(load_BE, layout, held_S)
        spent.append(time.perf_counter() - begin)
    return float(np.median(spent)) * 1e6
