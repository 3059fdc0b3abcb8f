"""The placement policies by name, for `plan`, the balancer and the simulator."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from balancer.policies.craft import craft
from balancer.policies.eplb import eplb, eplb_hierarchical
from balancer.policies.fractional import fractional
from balancer.policies.scalpel import scalpel
from balancer.policies.sparse import Layout
from balancer.policies.spread import spread_evenly

__all__ = ["DEFAULT_POLICY", "checked_knobs", "find", "names"]

# The policy to use unless there is a reason for another one.
DEFAULT_POLICY = "fractional"

_POLICIES: dict[str, Callable[..., Layout]] = {
    "spread": spread_evenly,
    "eplb": eplb,
    "eplb-hierarchical": eplb_hierarchical,
    "scalpel": scalpel,
    "craft": craft,
    "fractional": fractional,
}


def names() -> tuple[str, ...]:
    """Return the names of the policies, as `find` and the balancer's settings take them."""
    return tuple(_POLICIES)


def find(policy: str) -> Callable[..., Layout]:
    """Return the policy's function by its name. Raises ValueError, which lists the names."""
    try:
        return _POLICIES[policy]
    except (KeyError, TypeError):
        raise ValueError(f"policy {policy!r} is none of {', '.join(_POLICIES)}") from None


def checked_knobs(policy: str, knobs: dict[str, Any]) -> dict[str, Any]:
    """Return knobs if the policy has all of them, else raise ValueError; the policy itself checks values."""
    parameters = inspect.signature(find(policy)).parameters.values()
    known = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    for name in knobs:
        if name not in known:
            raise ValueError(f"{name} is no knob of {policy}; it has: {', '.join(known) or 'none'}")
    return knobs
