"""Placement policies: pure functions of arrays (shapes in their docstrings).

plan("fractional", load_LE, servers=64, slots=320) -> Plan
names()                                            -> what may stand in place of "fractional"
"""

from __future__ import annotations

from typing import Any

import numpy.typing as npt

from balancer.policies.eplb_dropin import rebalance_experts
from balancer.policies.fractional import FractionalBalancer
from balancer.policies.problem import make_problem
from balancer.policies.registry import DEFAULT_POLICY, checked_knobs, find, names
from balancer.policies.scalpel_balancer import ScalpelBalancer, rebalance
from balancer.policies.spread import spread
from balancer.policies.types import Move, Plan, Problem, make_plan

__all__ = [
    "DEFAULT_POLICY",
    "FractionalBalancer",
    "Move",
    "Plan",
    "Problem",
    "ScalpelBalancer",
    "make_plan",
    "names",
    "plan",
    "rebalance",
    "rebalance_experts",
    "spread",
]


def plan(
    policy: str,
    load_LE: npt.ArrayLike,
    servers: int,
    slots: int | npt.ArrayLike,
    *,
    current: Plan | npt.ArrayLike | None = None,
    speeds_S: npt.ArrayLike | None = None,
    **knobs: Any,
) -> Plan:
    """Says which server is to hold which experts, and what share of their load it gets.

    Args:
        policy: One of `names()`.
        load_LE: (L, E) numbers, finite and at least 0; any unit.
        servers: S.
        slots: Replicas per layer, dealt to the servers as evenly as can be (the first ones get one
            more); or (S,) or (L, S): how many experts of a layer each server may hold.
        current: What is held now: a plan, or bool (L, S, E).
        speeds_S: (S,) finite and above 0; all equal by default.
        knobs: The policy's own, by name; see its function.

    Raises:
        ValueError: An argument is wrong; the message names it. So with an unknown policy or knob.
    """
    problem = make_problem(load_LE, servers, slots, current, speeds_S)
    holds_LSE, shares_LSE = find(policy)(problem, **checked_knobs(policy, knobs))
    return make_plan(policy, problem, holds_LSE, shares_LSE)
