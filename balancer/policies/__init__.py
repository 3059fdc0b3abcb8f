"""Placement policies: pure functions of arrays (shapes in their docstrings)."""

from balancer.policies.spread import spread

__all__ = ["spread"]
