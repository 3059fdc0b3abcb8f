"""The placement policies by name, for `plan`, the balancer and the simulator.

Another package adds a policy by an entry point of the group `eaas.policies` (docs/policies.md).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from balancer.policies.sparse import Layout

__all__ = ["DEFAULT_POLICY", "GROUP", "checked_knobs", "find", "is_ours", "names"]

GROUP = "eaas.policies"

# The policy to use unless there is a reason for another one.
DEFAULT_POLICY = "fractional"

_OURS = {
    name: EntryPoint(name, place, GROUP)
    for name, place in {
        "spread": "balancer.policies.spread:spread_evenly",
        "eplb": "balancer.policies.eplb:eplb",
        "eplb-hierarchical": "balancer.policies.eplb:eplb_hierarchical",
        "scalpel": "balancer.policies.scalpel:scalpel",
        "craft": "balancer.policies.craft:craft",
        "fractional": "balancer.policies.fractional.layout:fractional",
    }.items()
}


def names() -> tuple[str, ...]:
    """Return the names of the policies, as `find` and the balancer's settings take them."""
    return (*_OURS, *sorted(_others()))


def is_ours(policy: str) -> bool:
    """Whether a policy is built in."""
    return isinstance(policy, str) and policy in _OURS


def find(policy: str) -> Callable[..., Layout]:
    """Return the policy's function by its name.

    Raises:
        ValueError: The name is unknown (the message lists those known), or its package cannot be used.
    """
    if not isinstance(policy, str) or not (found := _OURS.get(policy) or _others().get(policy)):
        raise ValueError(f"policy {policy!r} is none of {', '.join(names())}")
    try:
        loaded = found.load()
    except (ImportError, AttributeError) as error:
        raise ValueError(f"policy {policy!r} ({found.value}): {error}") from error
    if not callable(loaded):
        raise ValueError(f"policy {policy!r} ({found.value}) is no function")
    function: Callable[..., Layout] = loaded
    return function


def _others() -> dict[str, EntryPoint]:
    """Return the policies of other packages by name. They cannot replace a built-in name."""
    return {found.name: found for found in entry_points(group=GROUP) if found.name not in _OURS}


def checked_knobs(policy: str, knobs: dict[str, Any]) -> dict[str, Any]:
    """Return knobs if the policy has all of them, else raise ValueError; the policy itself checks values."""
    parameters = inspect.signature(find(policy)).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    for name in knobs:
        if name not in known:
            raise ValueError(f"{name} is no knob of {policy}; it has: {', '.join(known) or 'none'}")
    return knobs
