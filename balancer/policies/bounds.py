"""A proven lower bound of the PAR that any plan can reach, to show how good a plan is."""

from __future__ import annotations

import numpy as np

from balancer.policies.compact import replicate
from balancer.policies.types import Float, Problem

_ROUNDING = 1e-12

__all__ = ["par_bound"]


def par_bound(problem: Problem) -> Float:
    """float64 (L): lower bound of the PAR of any plan with these slots.

    The higher of two levels over the mean, both at least 1:

    - The level to which servers must be filled: a server with c slots takes at most the c hottest experts.
    - The least M with sum over experts of max(1, ceil(load / (M * highest speed))) <= slots, over servers
      with slots. Giving each further replica to the expert with the highest load per replica finds that M
      (Adams' apportionment).

    Time O(L * E) if the first level is such an M, as with E + S slots or more; else
    O(L * (E + extra slots) * log E), plus O(L * (E log E + S log S)) if slots do not follow the speeds.
    """
    load_LE, slots_LS = problem.load_LE, problem.slots_LS
    usable_LS = slots_LS > 0
    fill_L = _fill(problem)
    # Load that the fastest server takes in a layer filled to that level.
    fastest_L = np.where(usable_LS, problem.speeds_S, 0.0).max(axis=1)
    most_L = load_LE.sum(axis=1) / problem.speeds_S.sum() * fill_L * fastest_L
    parts_LE = np.divide(
        load_LE, most_L[:, None], out=np.ones_like(load_LE), where=most_L[:, None] > 0
    )
    tight_L = np.maximum(np.ceil(parts_LE), 1).sum(axis=1) > problem.slots_L
    over_L = np.ones(problem.layers)
    servers_L = usable_LS.sum(axis=1)
    for servers in np.unique(servers_L[tight_L]).tolist():
        of_N = np.flatnonzero(tight_L & (servers_L == servers))
        load_NE = load_LE[of_N]
        each_NE = load_NE / replicate(load_NE, problem.slots_L[of_N], servers)
        over_L[of_N] = each_NE.max(axis=1) / most_L[of_N]
    return fill_L * np.maximum(over_L, 1.0)


def _fill(problem: Problem) -> Float:
    """float64 (L): level to which servers must be filled, over the mean.

    The level is the least t with sum over servers of min(t * speed, c hottest) = load.

    If some servers take their c hottest experts, then t >= (load - theirs) / (speed of the others). For the
    servers that fill up first, both sides are equal.
    """
    load_LE, slots_LS, speeds_S = problem.load_LE, problem.slots_LS, problem.speeds_S
    fill_L = np.ones(problem.layers)
    # The c hottest of E experts have c / E of the load at least.
    part_LS = speeds_S / speeds_S.sum()
    total_L = load_LE.sum(axis=1)
    # Less is rounded to nothing.
    has_load_L = total_L / speeds_S.sum() >= np.finfo(np.float64).tiny
    of_N = np.flatnonzero((slots_LS < part_LS * problem.experts).any(axis=1) & has_load_L)
    if not len(of_N):
        return fill_L
    hottest_NE = np.cumsum(-np.sort(-load_LE[of_N], axis=1), axis=1)
    most_NS = np.take_along_axis(hottest_NE, np.maximum(slots_LS[of_N], 1) - 1, axis=1)
    most_NS[slots_LS[of_N] == 0] = 0.0
    order_NS = np.argsort(most_NS / speeds_S, axis=1)
    full_NS = np.take_along_axis(most_NS, order_NS, axis=1).cumsum(axis=1)
    # Rounded sums must not lift the bound above what a plan can reach.
    rest_NS = total_L[of_N][:, None] - full_NS[:, :-1] * (1 + _ROUNDING)
    speed_NS = speeds_S[order_NS]
    left_NS = speed_NS[:, ::-1].cumsum(axis=1)[:, ::-1][:, 1:]
    level_N = (rest_NS / left_NS).max(axis=1, initial=0.0)
    fill_L[of_N] = np.maximum(level_N / (total_L[of_N] / speeds_S.sum()), 1.0)
    return fill_L
