"""The last steps of planning: replicas go to different nodes; PAR, lower bound and transit are measured."""

from __future__ import annotations

import numpy as np

from balancer.policies import compiled
from balancer.policies.apart import ALL, put_apart, split_apart
from balancer.policies.bounds import par_bound
from balancer.policies.measure import par
from balancer.policies.types import Holds, Plan, Problem, Shares

__all__ = ["make_plan"]


def make_plan(
    policy: str,
    problem: Problem,
    holds_LSE: Holds,
    shares_LSE: Shares,
    *,
    loads_count: bool = True,
    best_split: bool = False,
    rows: bool = True,
) -> Plan:
    """Measure a policy's layout and return it as a plan; put replicas on different nodes first, if known.

    Args:
        policy: Name of the policy.
        problem: The policy's input.
        holds_LSE: (L, S, E) which server holds which expert; changed in place if nodes are known.
        shares_LSE: (L, S, E) each replica's share of its expert's tokens; changed with it.
        loads_count: Whether moved replicas keep the servers' loads, so that an expert with three replicas or
            more gets two nodes only; else each of its replicas gets a node.
        best_split: Whether the shares are those of the best split, also after replicas have moved.
        rows: Whether servers that are alike may exchange all they hold.

    Time O(L * S * E).
    """
    if problem.nodes is not None:
        risen = put_apart(
            *(holds_LSE, shares_LSE, problem.nodes),
            load_LE=problem.load_LE if loads_count else None,
            slots_LS=problem.slots_LS,
            speeds_S=problem.speeds_S,
            current_LSE=problem.current_LSE,
            rows=rows and loads_count and problem.current_LSE is None,
            spread_over=2 if loads_count else ALL,
        )
        for layer, peak in risen.items() if best_split else ():
            split_apart(
                *(problem.load_LE[layer], holds_LSE[layer], shares_LSE[layer]),
                *(problem.nodes, problem.speeds_S, peak),
            )
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
