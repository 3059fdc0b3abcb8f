"""The last steps of planning: replicas go to different nodes; PAR, lower bound and transit are measured."""

from __future__ import annotations

import numpy as np

from balancer.policies.apart import ALL, Nodes, put_apart, split_apart
from balancer.policies.bounds import par_bound
from balancer.policies.measure import peak_to_mean
from balancer.policies.sparse import Layout
from balancer.policies.types import Plan, Problem

__all__ = ["make_plan"]


# Replicas are put on other nodes in dense arrays of several layers, of at most so many elements, or of one.
_MOST_DENSE = 1 << 24


def make_plan(
    policy: str,
    problem: Problem,
    layout: Layout,
    *,
    loads_count: bool = True,
    best_split: bool = False,
    rows: bool = True,
) -> Plan:
    """Measure a policy's layout and return it as a plan; put replicas on different nodes first, if known.

    Args:
        policy: Name of the policy.
        problem: The policy's input.
        layout: The policy's result; stays as it is.
        loads_count: Whether moved replicas keep the servers' loads, so that an expert with three replicas or
            more gets two nodes only; else each of its replicas gets a node.
        best_split: Whether the shares are those of the best split, also after replicas have moved.
        rows: Whether servers that are alike may exchange all they hold.

    Time O(L * S + replicas), and O(L * S * E) if nodes are known.
    """
    if problem.nodes is not None:
        each = max(1, _MOST_DENSE // (problem.servers * problem.experts))
        layout = Layout.joined(
            [
                _put_apart(
                    problem, problem.nodes, layout, begin, each, loads_count, best_split, rows
                )
                for begin in range(0, problem.layers, each)
            ]
        )
    before = problem.current
    transit = 0 if before is None else int(layout.added_to(before).sum())
    par_L = peak_to_mean(layout.server_load(problem.load_LE), problem.speeds_S)
    bound_L = par_bound(problem)
    # An optimal plan is at the bound. Rounding can put its PAR a few units in the last place below it.
    rounded_L = (par_L < bound_L) & (par_L > bound_L * (1 - 1e-12))
    return Plan(
        policy=policy,
        layout=layout,
        par_L=np.where(rounded_L, bound_L, par_L),
        bound_L=bound_L,
        transit=transit,
        problem=problem,
    )


def _put_apart(
    problem: Problem,
    nodes: Nodes,
    layout: Layout,
    begin: int,
    count: int,
    loads_count: bool,
    best_split: bool,
    rows: bool,
) -> Layout:
    """Put the replicas of some layers on different nodes."""
    end = min(begin + count, problem.layers)
    holds_LSE, shares_LSE = layout.part(begin, end).dense()
    load_LE = problem.load_LE[begin:end]
    current = problem.current
    risen = put_apart(
        *(holds_LSE, shares_LSE, nodes),
        load_LE=load_LE if loads_count else None,
        slots_LS=problem.slots_LS[begin:end],
        speeds_S=problem.speeds_S,
        current_LSE=None if current is None else current.part(begin, end).holds_LSE,
        rows=rows and loads_count and current is None,
        spread_over=2 if loads_count else ALL,
    )
    for layer, peak in risen.items() if best_split else ():
        split_apart(
            *(load_LE[layer], holds_LSE[layer], shares_LSE[layer]),
            *(nodes, problem.speeds_S, peak),
        )
    return Layout.of(holds_LSE, shares_LSE)
