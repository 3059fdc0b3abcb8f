"""Placement policies of the balancer: pure functions from loads to layouts (shapes in their docstrings).

plan("fractional", load_LE, servers=64, slots=320) -> Plan
names()                                            -> the policies' names

FractionalBalancer and ScalpelBalancer keep state between calls of step(hotness_WLE). The functions
rebalance_experts and rebalance have the signatures of DeepSeek's EPLB and of ScalpeLB.
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from balancer.policies.eplb_dropin import rebalance_experts
from balancer.policies.fractional import FractionalBalancer
from balancer.policies.plan import make_plan
from balancer.policies.problem import make_problem
from balancer.policies.registry import DEFAULT_POLICY, checked_knobs, find, names
from balancer.policies.scalpel_balancer import ScalpelBalancer, rebalance
from balancer.policies.sparse import Layout
from balancer.policies.token_ids import count_token_ids
from balancer.policies.types import Plan

__all__ = [
    "DEFAULT_POLICY",
    "FractionalBalancer",
    "Layout",
    "Plan",
    "ScalpelBalancer",
    "count_token_ids",
    "names",
    "plan",
    "rebalance",
    "rebalance_experts",
]


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
    return make_plan(policy, problem, layout, **_AFTER.get(policy, {}))
