"""Adapts the live balancer's policies (`balancer.policies`) to simulated replays.

With `+split` after a policy's name, clients split each batch over the replicas in the best way
(`eaas.minmax`) instead of by the plan's shares; with `+dispatch` as attention clients do. With
`+spare` one slot of each server follows the load, too (`sparing`).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

import balancer.policies
from balancer.policies import DEFAULT_POLICY, FractionalBalancer, Plan, ScalpelBalancer
from balancer.policies.registry import find
from balancer.policies.sparse import Layout
from eaas.errors import ConfigError

__all__ = [
    "DISPATCH",
    "SPARE",
    "SPLIT",
    "STATIC",
    "Planner",
    "first_layout",
    "make_planner",
    "parse_name",
    "policy_names",
]

# The reference for the other policies: contiguous experts, no redundant replicas, no plans.
STATIC = "static"
SPLIT, DISPATCH, SPARE = "+split", "+dispatch", "+spare"


class Planner(Protocol):
    """A policy in a replay, which plans from the last iterations."""

    def step(
        self, counts_WLE: npt.NDArray[Any], load_LE: npt.NDArray[np.float64], current: Layout
    ) -> Callable[[], Plan]:
        """Prepare the replay's next plan; only the time of the returned function counts as planning.

        Args:
            counts_WLE: Counts of the last W iterations.
            load_LE: Sum of these counts over W.
            current: What the servers hold now, and their shares.
        """
        ...


# Policies with state, used in place of their plain functions.
_WITH_MEMORY: dict[str, type[ScalpelBalancer] | type[FractionalBalancer]] = {
    "scalpel": ScalpelBalancer,
    "fractional": FractionalBalancer,
}


class _PolicyPlanner:
    """A policy selected by name; a plain one with a knob `window_WLE` also gets the counts."""

    def __init__(
        self, policy: str, servers: int, slots: int, nodes: Sequence[str] | None = None
    ) -> None:
        self._policy, self._servers, self._slots = policy, servers, slots
        self._nodes = None if nodes is None else list(nodes)
        self._step: Callable[[Any], Plan] | None = None
        self._wants_window = "window_WLE" in inspect.signature(find(policy)).parameters

    def step(
        self, counts_WLE: npt.NDArray[Any], load_LE: npt.NDArray[np.float64], current: Layout
    ) -> Callable[[], Plan]:
        if self._policy in _WITH_MEMORY:
            # The policy is created at the first plan and keeps its own state from then on.
            if self._step is None:
                made = _WITH_MEMORY[self._policy]
                self._step = made(
                    self._servers, self._slots, current=current, nodes_S=self._nodes
                ).step
            return partial(self._step, counts_WLE)
        knobs = {"window_WLE": counts_WLE} if self._wants_window else {}
        return lambda: balancer.policies.plan(
            self._policy,
            load_LE,
            self._servers,
            self._slots,
            current=current,
            nodes_S=self._nodes,
            **knobs,
        )


def policy_names() -> tuple[str, ...]:
    """Return the names of policies that can be replayed: `static` and the balancer's; without an ending."""
    return (STATIC, *balancer.policies.names())


def usual_names() -> tuple[str, ...]:
    """Return what `eaas trace compare` compares by default: all policies, and the default with `+split`."""
    return (*policy_names(), DEFAULT_POLICY + SPLIT)


def parse_name(name: str) -> tuple[str, str]:
    """Split a policy's name: the policy, and what follows it: `SPLIT`, `DISPATCH`, `SPARE` or nothing.

    Raises ConfigError if it is unknown.
    """
    policy, plus, ending = name.partition("+")
    if policy not in policy_names() or plus + ending not in ("", SPLIT, DISPATCH, SPARE):
        raise ConfigError(
            f"policy {name}: give one of {', '.join(policy_names())}; {SPLIT}, {DISPATCH} or {SPARE} may "
            "follow"
        )
    return policy, plus + ending


def make_planner(
    policy: str, servers: int, slots: int, nodes: Sequence[str] | None = None
) -> Planner | None:
    """Make the planner of a policy for one replay; None for `static`, which keeps the first layout.

    Args:
        policy: Without an ending.
        servers: S.
        slots: Replicas per layer.
        nodes: Names of the servers' nodes; None: unknown.
    """
    if policy == STATIC:
        return None
    return _PolicyPlanner(policy, servers, slots, nodes)


def first_layout(layers: int, servers: int, experts: int) -> Layout:
    """Make a replay's first layout: experts in the order of their ids, one replica each, evenly dealt."""
    holds_SE = np.zeros((servers, experts), np.bool_)
    for server, block in enumerate(np.array_split(np.arange(experts), servers)):
        holds_SE[server, block] = True
    return Layout.joined([Layout.of(holds_SE[None])] * layers)
