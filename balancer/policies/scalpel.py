"""ScalpeLB: place once, then few swaps; place again only what has drifted (LauzHack/Huawei MoE dynamic
load balancing competition).

    weight      what is planned for: mean + K * std of a window (`window.planning_weight`)
    real        what was seen: the load itself; it only judges placements
    drifted     a layer whose maintained PAR is worse than a fresh placement's by more than drift_tol
    pack        what a fresh placement puts together on a server, whichever one that is to be
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from balancer.policies import _planning
from balancer.policies.compact import Compact, place, replicate, usable_slots
from balancer.policies.measure import equal_shares, held_load, peak_to_mean
from balancer.policies.problem import checked_window
from balancer.policies.types import Float, Holds, Int, Layout, Problem
from balancer.policies.window import planning_weight

__all__ = ["Matching", "align", "drifted_layers", "fresh_placement", "scalpel", "swap_hottest"]

Matching = Literal["greedy", "optimal"]


def scalpel(
    problem: Problem,
    *,
    window_WLE: npt.NDArray[np.number] | None = None,
    k: float | None = None,
    shift_tv: float = 0.2,
    budget: int = 8,
    drift_tol: float = 0.2,
    heavy_frac: float = 0.5,
    matching: Matching = "greedy",
) -> Layout:
    """One cycle: without `current` a fresh placement, else the current one maintained.

    All replicas of an expert have equal shares; none of them meet on a server.

    Args:
        problem: What to plan; its load is what was seen.
        window_WLE: (W, L, E) loads by step, oldest first; without it the problem's load is planned
            for as it is.
        k: Standard deviations on top of the mean; 2 from 192 experts on, else 0, by default.
        shift_tv: Layers are planned for the end of the window where the total-variation distance
            of its halves is above that; above 1 never.
        budget: Swaps per layer and cycle at most.
        drift_tol: By how much the PAR of a layer may be above that of a fresh placement.
        heavy_frac: Where more than that part of the layers has drifted, all are placed anew.
        matching: How fresh packs find their servers: the greatest overlap first ("greedy"), or the
            greatest sum of overlaps ("optimal", the Hungarian method, O(S^3) per layer).

    Raises:
        ValueError: A knob is out of its range; the message names it.

    Time O(L * (S * E + P * log(E + S) + S^2)), and O(W * L * E) for the window.
    """
    if matching not in ("greedy", "optimal"):
        raise ValueError(f"matching is {matching!r}, must be greedy or optimal")
    if budget < 0:
        raise ValueError(f"budget is {budget}, must be at least 0")
    weight_LE = problem.load_LE
    if window_WLE is not None:
        window_WLE = checked_window("window_WLE", window_WLE, (problem.layers, problem.experts))
        weight_LE = planning_weight(window_WLE, k, shift_tv)
    fresh = fresh_placement(problem, weight_LE)
    current_LSE = problem.current_LSE
    if current_LSE is None:
        return fresh.layout()
    # Step 1: swaps in place.
    held_LSE = swap_hottest(current_LSE, weight_LE, problem.speeds_S, budget)
    # Step 2: layers where that is not enough; all of them where those are many.
    drifted_L = drifted_layers(problem, held_LSE, fresh, drift_tol)
    if drifted_L.mean() > heavy_frac:
        drifted_L[:] = True
    # Step 3: those anew, with as little transit as can be.
    layers = np.flatnonzero(drifted_L)
    held_LSE[layers] = align(problem, fresh, layers, matching)
    return held_LSE, equal_shares(held_LSE)


def fresh_placement(problem: Problem, weight_LE: Float) -> Compact:
    """Replicas where weight per replica is highest, then packed, heaviest first."""
    total_L = usable_slots(problem.slots_LS, problem.experts)
    count_LE = replicate(weight_LE, total_L, problem.servers)
    return place(weight_LE, count_LE, problem.slots_LS, problem.speeds_S)


def swap_hottest(current_LSE: Holds, weight_LE: Float, speeds_S: Float, budget: int) -> Holds:
    """The current layout after `budget` swaps per layer at most.

    A swap: of the servers with the highest and the lowest weight / speed, the heaviest replica of
    the one for the lightest of the other, of those that the other has not; only while it lowers
    the peak of the two. Replica counts stay.
    """
    layers, servers, experts = current_LSE.shape
    held_LSE = current_LSE.copy()
    swaps_L = np.zeros(layers, dtype=np.int64)
    _planning.swap_hottest(weight_LE, speeds_S, layers, servers, experts, budget, held_LSE, swaps_L)
    return held_LSE


def drifted_layers(
    problem: Problem, held_LSE: Holds, fresh: Compact, drift_tol: float
) -> npt.NDArray[np.bool_]:
    """bool (L): by the loads seen, the layout is worse than the fresh one by more than that.

    So is one that leaves an expert without a server or has more replicas than slots: the servers
    changed.
    """
    load_LS, fits_L = held_load(problem.load_LE, held_LSE, problem.slots_LS)
    held_L = peak_to_mean(load_LS, problem.speeds_S)
    fresh_L = peak_to_mean(fresh.server_load(problem.load_LE), problem.speeds_S)
    drifted_L: npt.NDArray[np.bool_] = ~fits_L | (held_L > fresh_L + drift_tol)
    return drifted_L


def align(problem: Problem, fresh: Compact, layers: Int, matching: Matching) -> Holds:
    """bool (N, S, E): the fresh placement of those layers, its packs where most of them are held.

    Packs change places between servers with the same slots and speed only.
    """
    current_LSE = problem.current_LSE
    assert current_LSE is not None
    count_NE, server_NP = fresh.count_LE[layers], fresh.server_LP[layers]
    server_of_NS = np.empty((len(layers), fresh.servers), dtype=np.int64)
    _, alike_S = np.unique(problem.speeds_S, return_inverse=True)
    kind_NS = problem.slots_LS[layers] * fresh.servers + alike_S
    _planning.match(
        *(count_NE, server_NP, current_LSE[layers], kind_NS),
        *(len(layers), fresh.servers, problem.experts, server_NP.shape[1]),
        matching == "optimal",
        server_of_NS,
    )
    moved_NP = np.take_along_axis(server_of_NS, np.maximum(server_NP, 0), 1).astype(np.int32)
    moved = Compact(count_NE, np.where(server_NP < 0, server_NP, moved_NP), fresh.servers)
    return moved.holds()
