"""How good a plan can be at all."""

from __future__ import annotations

import numpy as np

from balancer.policies.types import Float, Problem

__all__ = ["par_bound"]


def par_bound(problem: Problem) -> Float:
    """float64 (L): no layout with these slots has a lower PAR.

    The least M with sum over experts of ceil(load / (M * highest speed)) <= slots, over the mean.
    """
    load_LE, speeds_S = problem.load_LE, problem.speeds_S
    mean_L = load_LE.sum(axis=1) / speeds_S.sum()
    top = float(speeds_S.max())
    bound_L = np.ones(len(mean_L))
    slots_L = problem.slots_LS.sum(axis=1)
    for layer in np.flatnonzero(mean_L > 0):
        count_E = np.ones(load_LE.shape[1])
        for _ in range(int(slots_L[layer]) - len(count_E)):
            count_E[np.argmax(load_LE[layer] / count_E)] += 1
        bound_L[layer] = max(1.0, (load_LE[layer] / count_E).max() / top / mean_L[layer])
    return bound_L
