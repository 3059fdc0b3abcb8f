"""Placement policies: pure functions of arrays (shapes in their docstrings)."""

from balancer.policies.repair import even_shares, repair, restore
from balancer.policies.spread import spread

__all__ = ["even_shares", "repair", "restore", "spread"]
