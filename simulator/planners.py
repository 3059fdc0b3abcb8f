"""The policies of `balancer.policies`, asked as a cluster would ask them.

A name may end in `+split`: the policy's clients then split each batch over the replicas anew
(`balancer.policies.split`) instead of by the plan's shares.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

import balancer.policies
from balancer.policies import Plan
from balancer.policies.registry import find
from eaas.errors import ConfigError

__all__ = [
    "SPLIT",
    "STATIC",
    "Planner",
    "first_layout",
    "make_planner",
    "parse_name",
    "policy_names",
]

Holds = npt.NDArray[np.bool_]
Shares = npt.NDArray[np.float64]

# Contiguous experts, no replica, never planned: what the others are worth.
STATIC = "static"
SPLIT = "+split"


class Planner(Protocol):
    """Is given the last iterations, and says where experts go."""

    def step(
        self, counts_WLE: npt.NDArray[Any], load_LE: npt.NDArray[np.float64], current_LSE: Holds
    ) -> Callable[[], Plan]:
        """A planning that is ready to start: what is done before is not the policy's work.

        Args:
            counts_WLE: Counts of the last W iterations.
            load_LE: Their sum, which a monitor keeps up anyway.
            current_LSE: What the servers hold now.
        """
        ...


@dataclass(frozen=True)
class _PolicyPlanner:
    """A policy by its name; one that has a knob `window_WLE` is given the counts themselves."""

    policy: str
    servers: int
    slots: int

    def step(
        self, counts_WLE: npt.NDArray[Any], load_LE: npt.NDArray[np.float64], current_LSE: Holds
    ) -> Callable[[], Plan]:
        knobs = {"window_WLE": counts_WLE} if self._wants_window() else {}
        return lambda: balancer.policies.plan(
            self.policy, load_LE, self.servers, self.slots, current=current_LSE, **knobs
        )

    def _wants_window(self) -> bool:
        return "window_WLE" in inspect.signature(find(self.policy)).parameters


def policy_names() -> tuple[str, ...]:
    """What may be compared, without `+split`."""
    return (STATIC, *balancer.policies.names())


def parse_name(name: str) -> tuple[str, bool]:
    """Policy, and whether its clients split each batch. Raises ConfigError for an unknown one."""
    policy = name.removesuffix(SPLIT)
    if policy not in policy_names():
        raise ConfigError(
            f"policy {name}: give one of {', '.join(policy_names())}, {SPLIT} after it or not"
        )
    return policy, policy != name


def make_planner(policy: str, servers: int, slots: int) -> Planner | None:
    """The planner of a policy; None for `static`."""
    if policy == STATIC:
        return None
    return _PolicyPlanner(policy, servers, slots)


def first_layout(layers: int, servers: int, experts: int) -> tuple[Holds, Shares]:
    """Where a replay begins: experts in the order of their ids, one replica each, evenly over servers.

    Returns:
        holds_LSE, shares_LSE.
    """
    holds_SE = np.zeros((servers, experts), np.bool_)
    for server, block in enumerate(np.array_split(np.arange(experts), servers)):
        holds_SE[server, block] = True
    holds_LSE = np.repeat(holds_SE[None], layers, axis=0)
    return holds_LSE, holds_LSE.astype(np.float64)
