"""Placement policies of the balancer: pure functions from loads to layouts (shapes in their docstrings).

plan("fractional", load_LE, servers=64, slots=320) -> Plan
names()                                            -> the policies' names

FractionalBalancer and ScalpelBalancer keep state between calls of step(hotness_WLE). The functions
rebalance_experts and rebalance have the signatures of DeepSeek's EPLB and of ScalpeLB.
"""

from __future__ import annotations

from balancer.policies.eplb_dropin import rebalance_experts
from balancer.policies.fractional import FractionalBalancer
from balancer.policies.plan import plan
from balancer.policies.registry import DEFAULT_POLICY, names
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
