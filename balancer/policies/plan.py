"""A plan: a policy's layout, with replicas on different nodes, and its PAR, lower bound and transit."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from balancer.policies.anti_affinity import ALL, Nodes, apply_anti_affinity, split_again
from balancer.policies.bounds import par_bound
from balancer.policies.measure import peak_to_mean
from balancer.policies.problem import make_problem
from balancer.policies.registry import checked_knobs, find, is_ours
from balancer.policies.sparse import Layout
from balancer.policies.types import Plan, Problem

__all__ = ["make_plan", "plan"]

# Replicas are put on other nodes in dense arrays of several layers, of at most so many elements, or of one.
_MOST_DENSE = 1 << 24

# What the last pass may do with a policy's layout (`make_plan`).
_AFTER: dict[str, dict[str, Any]] = {
    "spread": {"loads_count": False},
    # Groups stay on their nodes.
    "eplb-hierarchical": {"rows": False},
    "fractional": {"best_split": True},
}


def plan(
    policy: str,
    load_LE: npt.ArrayLike,
    servers: int,
    slots: int | npt.ArrayLike,
    *,
    current: Plan | Layout | npt.ArrayLike | None = None,
    speeds_S: npt.ArrayLike | None = None,
    nodes_S: npt.ArrayLike | None = None,
    **knobs: Any,
) -> Plan:
    """Plan which server holds which experts, and which share of their load it takes.

    Args:
        policy: One of `names()`.
        load_LE: (L, E) numbers, finite and at least 0; any unit.
        servers: S.
        slots: Replicas per layer, dealt evenly to the servers (the first servers get one more if they do
            not divide evenly); or (S,) or (L, S): experts of a layer that each server may hold, at most E.
        current: The current layout: a plan, a `Layout`, or bool (L, S, E).
        speeds_S: (S,) finite and above 0; all equal by default.
        nodes_S: (S,) the node of each server: numbers from 0, or names `NODE` or `RACK/NODE`. Replicas of an
            expert then go to different nodes and racks, as far as the policy's counts allow. With a limit
            of `fractional`'s `cross_node_replicas` they stay where the policy puts them.
        knobs: The policy's own parameters, by name; see its function.

    Raises:
        ValueError: An argument is wrong, or a policy or knob is unknown; the message names it.
    """
    budget = knobs.get("cross_node_replicas") is not None
    if budget:
        # The policy checks them itself.
        knobs["nodes_S"] = nodes_S
    problem = make_problem(load_LE, servers, slots, current, speeds_S, None if budget else nodes_S)
    layout = find(policy)(problem, **checked_knobs(policy, knobs))
    if not is_ours(policy):
        _check_layout(policy, problem, layout)
    return make_plan(policy, problem, layout, **_AFTER.get(policy, {}))


def _check_layout(policy: str, problem: Problem, layout: Layout) -> None:
    """Raise ValueError if the layout of another package's policy lacks an expert, or needs more slots."""
    shape = (problem.layers, problem.servers, problem.experts)
    if not isinstance(layout, Layout) or layout.shape != shape:
        raise ValueError(f"policy {policy} must return a Layout of shape {shape}")
    lacking = int((layout.count_LE == 0).sum())
    over = int((layout.count_LS > problem.slots_LS).sum())
    if lacking or over:
        raise ValueError(
            f"policy {policy}: {lacking} experts without a server, "
            f"{over} servers of a layer above their slots"
        )


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
        layout = _separated(problem, problem.nodes, layout, loads_count, best_split, rows)
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


def _separated(
    problem: Problem,
    nodes: Nodes,
    layout: Layout,
    loads_count: bool,
    best_split: bool,
    rows: bool,
) -> Layout:
    """Put the replicas of each expert on different nodes."""
    parts = []
    each = max(1, _MOST_DENSE // (problem.servers * problem.experts))
    for begin in range(0, problem.layers, each):
        end = min(begin + each, problem.layers)
        part, load_LE = layout.part(begin, end), problem.load_LE[begin:end]
        current = None if problem.current is None else problem.current.part(begin, end)
        holds_LSE, shares_LSE = part.dense()
        risen = apply_anti_affinity(
            *(holds_LSE, shares_LSE, nodes),
            load_LE=load_LE if loads_count else None,
            slots_LS=problem.slots_LS[begin:end],
            speeds_S=problem.speeds_S,
            current_LSE=None if current is None else current.holds_LSE,
            rows=rows and loads_count and current is None,
            spread_over=2 if loads_count else ALL,
        )
        peak_L = (part.server_load(load_LE) / problem.speeds_S).max(axis=1)
        for layer in risen if best_split else ():
            split_again(
                *(load_LE[layer], holds_LSE[layer], shares_LSE[layer]),
                *(nodes, problem.speeds_S, float(peak_L[layer])),
            )
        parts.append(Layout.of(holds_LSE, shares_LSE))
    return Layout.joined(parts)
