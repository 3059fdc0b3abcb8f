"""Recorded windows, made ready for learning, and the state of a cycle in them: NumPy, but for the tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from balancer.live.learned import KNOBS, features
from balancer.policies.problem import make_problem
from balancer.policies.scalpel import align, fresh_placement, scalpel, swap_hottest
from balancer.policies.types import Float, Holds, Problem
from balancer.policies.window import planning_weight, shift
from eaas.knobs.surrogate import Cycle
from eaas.trace import Trace

__all__ = ["Window", "advance", "cycle_of", "windows"]

_SAMPLES = 3  # of each window of the time to come


@dataclass(frozen=True, eq=False)
class Window:
    """Iterations that a plan is made from, and the time after them.

    Attributes:
        counts_WLE: As they were recorded.
        features_F: See `learned.features`.
        moments_4LE: Mean and standard deviation, and the same weighted towards the end.
        tv_L: Distance of its halves.
        load_LE: Its sum.
        next_BLE: Samples of the time to come.
    """

    counts_WLE: npt.NDArray[np.number]
    features_F: Float
    moments_4LE: Float
    tv_L: Float
    load_LE: Float
    next_BLE: Float


def windows(
    trace: Trace, interval: int, servers: int, slots: int, lifetime: int
) -> Iterator[Window]:
    """All that have a time of the same length after them, one after another.

    Args:
        trace: Recorded.
        interval: Iterations of a window.
        servers, slots: S, and replicas per layer.
        lifetime: Windows to come that samples are of, fewer at the trace's end.
    """
    for end in range(interval, trace.iterations - interval + 1, interval):
        counts_WLE = trace.counts_ILE[end - interval : end]
        last = min(trace.iterations, end + lifetime * interval)
        count = _SAMPLES * (last - end) // interval
        chosen = end + ((np.arange(count) + 0.5) * (last - end) / count).astype(np.int64)
        next_BLE = trace.counts_ILE[np.unique(chosen)].astype(np.float64)
        # A layer without a token has no balance.
        next_BLE = np.where(next_BLE.sum(axis=2, keepdims=True) > 0, next_BLE, 1.0)
        load_LE = counts_WLE.sum(axis=0, dtype=np.float64)
        yield Window(
            counts_WLE=counts_WLE,
            features_F=features(counts_WLE, servers, slots),
            moments_4LE=_moments(counts_WLE),
            tv_L=shift(counts_WLE),
            load_LE=np.where(load_LE.sum(axis=1, keepdims=True) > 0, load_LE, 1.0),
            next_BLE=next_BLE,
        )


def _moments(counts_WLE: npt.NDArray[np.number]) -> Float:
    # By the policy's own function, so that they are what it plans with.
    found = []
    for shift_tv in (np.inf, -1.0):
        mean_LE = planning_weight(counts_WLE, 0.0, shift_tv)
        found += [mean_LE, planning_weight(counts_WLE, 1.0, shift_tv) - mean_LE]
    return np.stack(found)


def cycle_of(
    window: Window, knobs_K: Float, current_LSE: Holds, slots: int, layers: npt.NDArray[np.int64]
) -> Cycle:
    """A cycle of some layers, with anchors made by the policy with these knobs."""
    k, shift_tv, budget = knobs_K[: KNOBS.index("budget") + 1]
    mean_LE, std_LE, late_mean_LE, late_std_LE = window.moments_4LE[:, layers]
    late_L1 = (window.tv_L[layers] > shift_tv)[:, None]
    weight_LE = np.where(late_L1, late_mean_LE + k * late_std_LE, mean_LE + k * std_LE)
    problem = _problem(window.load_LE[layers], current_LSE[layers], slots)
    fresh = align(problem, fresh_placement(problem, weight_LE), slice(None))
    assert problem.current_LSE is not None
    kept, more = (
        swap_hottest(problem.current_LSE, weight_LE, problem.speeds_S, int(budget) + extra)
        for extra in (0, 1)
    )
    tensors = (
        *(mean_LE, std_LE, late_mean_LE, late_std_LE, window.tv_L[layers]),
        *(window.load_LE[layers], window.next_BLE[:, layers], problem.current_LSE),
        *(problem.slots_LS, fresh.holds(), kept, more),
    )
    return Cycle(*(torch.from_numpy(np.ascontiguousarray(t)).double() for t in tensors))


def advance(
    window: Window, knobs: dict[str, float | int], current_LSE: Holds, slots: int, *, anew: bool
) -> Holds:
    """What is held after the policy's own cycle."""
    problem = _problem(window.load_LE, current_LSE, slots)
    holds_LSE, _ = scalpel(problem, window_WLE=window.counts_WLE, anew=anew, **knobs)  # type: ignore[arg-type]
    return holds_LSE


def _problem(load_LE: Float, current_LSE: Holds, slots: int) -> Problem:
    return make_problem(load_LE, current_LSE.shape[1], slots, current_LSE)
