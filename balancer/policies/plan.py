"""The last step of planning: makes a Plan of a policy's layout by measuring PAR, lower bound and transit."""

from __future__ import annotations

import numpy as np

from balancer.policies import compiled
from balancer.policies.bounds import par_bound
from balancer.policies.measure import par
from balancer.policies.types import Holds, Plan, Problem, Shares

__all__ = ["make_plan"]


def make_plan(policy: str, problem: Problem, holds_LSE: Holds, shares_LSE: Shares) -> Plan:
    """Measure a policy's layout and return it, unchanged, as a plan. Time O(L * S * E)."""
    current_LSE = problem.current_LSE
    transit = 0
    if current_LSE is not None:
        count = np.zeros((), dtype=np.int64)
        compiled.count_new(holds_LSE, current_LSE, count)
        transit = int(count)
    par_L = par(problem.load_LE, holds_LSE, shares_LSE, problem.speeds_S)
    bound_L = par_bound(problem)
    # An optimal plan is at the bound. Rounding can put its PAR a few units in the last place below it.
    rounded_L = (par_L < bound_L) & (par_L > bound_L * (1 - 1e-12))
    return Plan(
        policy=policy,
        holds_LSE=holds_LSE,
        shares_LSE=shares_LSE,
        par_L=np.where(rounded_L, bound_L, par_L),
        bound_L=bound_L,
        transit=transit,
        problem=problem,
    )
