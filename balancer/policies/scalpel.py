"""The policy ScalpeLB: place once, then make few swaps; re-place only layers that have drifted.

Source: LauzHack/Huawei MoE dynamic load balancing competition.

    weight      the load to plan for: mean + K * std of a window (`window.planning_weight`)
    real        the observed load, used only to score placements
    drifted     a layer whose maintained PAR exceeds a fresh placement's by more than drift_tol
    pack        experts that a fresh placement puts together on one server, not yet a particular one
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from balancer.policies import compiled
from balancer.policies.compact import Compact, place, replicate
from balancer.policies.measure import peak_to_mean
from balancer.policies.problem import checked_number, checked_window
from balancer.policies.sparse import Layout
from balancer.policies.types import Float, Holds, Int, Problem
from balancer.policies.window import planning_weight

__all__ = [
    "Matching",
    "align",
    "check_knobs",
    "drifted_layers",
    "fresh_placement",
    "scalpel",
    "swap_hottest",
]

Matching = Literal["greedy", "optimal"]

_ROUNDING = 1e-12


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
    anew: bool = False,
) -> Layout:
    """Lay out one cycle: a fresh placement without `current`, else the current one maintained.

    All replicas of an expert have equal shares and different servers.

    Args:
        problem: The input; its load is the observed one.
        window_WLE: (W, L, E) loads by step, oldest first; without it the plan is for the problem's load.
        k: Standard deviations on top of the mean; by default 2 from 192 experts on, else 0.
        shift_tv: A layer is planned for the end of the window if the total-variation distance of the
            window's halves is above this; above 1: never.
        budget: Most swaps per layer and cycle.
        drift_tol: Accepted excess of a layer's PAR over a fresh placement's.
        heavy_frac: If more than this part of the layers has drifted, all are placed anew.
        matching: How fresh packs find their servers: greatest overlap first ("greedy"), or greatest sum of
            overlaps ("optimal", the Hungarian method, O(S^3) per layer).
        anew: Place all layers anew, close to what servers hold, as in ScalpeLB's first cycle.

    Raises:
        ValueError: A knob is out of its range; the message names it.

    Time O(L * (S * E + P * log(E + S) + S^2)), and O(W * L * E) for the window.
    """
    check_knobs(k, shift_tv, budget, drift_tol, heavy_frac, matching)
    weight_LE = problem.load_LE
    if window_WLE is not None:
        window_WLE = checked_window("window_WLE", window_WLE, (problem.layers, problem.experts))
        weight_LE = planning_weight(window_WLE, k, shift_tv)
    fresh = fresh_placement(problem, weight_LE)
    if problem.current is None:
        return fresh.layout()
    if anew:
        return align(problem, fresh, slice(None), matching).layout()
    # Step 1: swaps in place.
    held_LSE = swap_hottest(problem.current, weight_LE, problem.speeds_S, budget)
    # Step 2: find layers for which that is not enough; re-place all layers if they are many.
    drifted_L = drifted_layers(problem, held_LSE, fresh, drift_tol)
    if drifted_L.mean() > heavy_frac:
        return align(problem, fresh, slice(None), matching).layout()
    # Step 3: re-place those, with the least transit.
    layers = np.flatnonzero(drifted_L)
    held_LSE[layers] = align(problem, fresh, layers, matching).layout().holds_LSE
    return Layout.of(held_LSE)


def check_knobs(
    k: float | None,
    shift_tv: float,
    budget: int,
    drift_tol: float,
    heavy_frac: float,
    matching: Matching,
) -> None:
    """Raise ValueError, with the knob's name, for a knob of `scalpel` that is out of its range."""
    if k is not None:
        checked_number("k", k)
    checked_number("shift_tv", shift_tv)
    checked_number("budget", budget, whole=True, most=1 << 62)
    checked_number("drift_tol", drift_tol)
    checked_number("heavy_frac", heavy_frac, most=1)
    if matching not in ("greedy", "optimal"):
        raise ValueError(f"matching is {matching!r}, must be greedy or optimal")


def fresh_placement(problem: Problem, weight_LE: Float) -> Compact:
    """Place anew, regardless of the current layout: replicate where weight per replica is highest, then pack.

    Packs heaviest first. `scalpel` starts with it, and later compares each layer's current layout with it.
    """
    count_LE = replicate(weight_LE, problem.slots_L, problem.servers)
    return place(weight_LE, count_LE, problem.slots_LS, problem.speeds_S)


def swap_hottest(current: Layout, weight_LE: Float, speeds_S: Float, budget: int) -> Holds:
    """Improve the current layout by at most `budget` swaps per layer.

    A swap exchanges the heaviest replica of the server with the highest weight / speed for the lightest one
    of the server with the lowest, of experts that the other lacks, if that lowers the higher of the two.
    Replica counts stay.
    """
    held_LSE = current.holds_LSE.copy()
    value_LE = weight_LE / np.maximum(current.count_LE, 1)
    load_LS = replace(current, share_N=np.ones(len(current))).server_load(value_LE)
    # Layers that may still improve.
    at_N = np.arange(len(held_LSE))
    for _ in range(budget):
        full_NS = load_LS[at_N] / speeds_S
        hot_N, cold_N = full_NS.argmax(axis=1), full_NS.argmin(axis=1)
        from_NE, to_NE = held_LSE[at_N, hot_N], held_LSE[at_N, cold_N]
        given_N = np.where(from_NE & ~to_NE, value_LE[at_N], -1.0).argmax(axis=1)
        got_N = np.where(to_NE & ~from_NE, value_LE[at_N], np.inf).argmin(axis=1)
        less_N = value_LE[at_N, given_N] - value_LE[at_N, got_N]
        hot_after_N, cold_after_N = load_LS[at_N, hot_N] - less_N, load_LS[at_N, cold_N] + less_N
        peak_N = np.maximum(hot_after_N / speeds_S[hot_N], cold_after_N / speeds_S[cold_N])
        # Ignores gains from rounding.
        better_N = peak_N < full_NS.max(axis=1) * (1 - _ROUNDING)
        better_N &= (from_NE & ~to_NE).any(axis=1) & (to_NE & ~from_NE).any(axis=1)
        if not better_N.any():
            break
        at_N, hot_N, cold_N, given_N, got_N = (
            each_N[better_N] for each_N in (at_N, hot_N, cold_N, given_N, got_N)
        )
        held_LSE[at_N, hot_N, given_N] = held_LSE[at_N, cold_N, got_N] = False
        held_LSE[at_N, hot_N, got_N] = held_LSE[at_N, cold_N, given_N] = True
        load_LS[at_N, hot_N] = hot_after_N[better_N]
        load_LS[at_N, cold_N] = cold_after_N[better_N]
    return held_LSE


def drifted_layers(
    problem: Problem, held_LSE: Holds, fresh: Compact, drift_tol: float
) -> npt.NDArray[np.bool_]:
    """bool (L): the layout's PAR under the observed load exceeds the fresh one's by more than drift_tol.

    Also true if the layout leaves an expert without a server or exceeds the slots, because the servers have
    changed.
    """
    held = Layout.of(held_LSE)
    fits_L = (held.count_LE > 0).all(axis=1) & (held.count_LS <= problem.slots_LS).all(axis=1)
    held_L = peak_to_mean(held.server_load(problem.load_LE), problem.speeds_S)
    fresh_L = peak_to_mean(fresh.layout().server_load(problem.load_LE), problem.speeds_S)
    drifted_L: npt.NDArray[np.bool_] = ~fits_L | (held_L > fresh_L + drift_tol)
    return drifted_L


def align(
    problem: Problem, fresh: Compact, layers: Int | slice, matching: Matching = "greedy"
) -> Compact:
    """Assign the packs of some layers' fresh placement to the servers that hold most of each pack.

    Packs change places only between servers with the same slots and speed.
    """
    assert problem.current_LSE is not None
    count_NE, server_NP = fresh.count_LE[layers], fresh.server_LP[layers]
    server_of_NS = np.empty((len(count_NE), fresh.servers), dtype=np.int64)
    _, alike_S = np.unique(problem.speeds_S, return_inverse=True)
    kind_NS = problem.slots_LS[layers] * fresh.servers + alike_S
    current_NSE = problem.current_LSE[layers]
    optimal = matching == "optimal"
    compiled.match(count_NE, server_NP, current_NSE, kind_NS, optimal, server_of_NS)
    moved_NP = np.take_along_axis(server_of_NS, np.maximum(server_NP, 0), 1).astype(np.int32)
    return Compact(count_NE, np.where(server_NP < 0, server_NP, moved_NP), fresh.servers)
