"""How good a plan can be at all."""

from __future__ import annotations

import numpy as np

from balancer.policies.compact import replicate, usable_slots
from balancer.policies.types import Float, Problem

__all__ = ["par_bound"]


def par_bound(problem: Problem) -> Float:
    """float64 (L): no layout with these slots has a lower PAR.

    The higher of 1 and M over the mean, where M is the least number with the sum over experts of
    ceil(load / (M * highest speed)) at most the slots: that many replicas are needed for it.
    """
    load_LE, speeds_S = problem.load_LE, problem.speeds_S
    mean_L = load_LE.sum(axis=1) / speeds_S.sum()
    # Handing out slots one by one where load per replica is highest gives the lowest maximum.
    slots_L = usable_slots(problem.slots_LS, problem.experts)
    count_LE = replicate(load_LE, slots_L, problem.servers)
    least_L = (load_LE / count_LE).max(axis=1) / speeds_S.max()
    ratio_L: Float = np.divide(least_L, mean_L, out=np.ones_like(mean_L), where=mean_L > 0)
    return np.maximum(1.0, ratio_L)
