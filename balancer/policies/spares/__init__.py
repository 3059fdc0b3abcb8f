"""Replicas in spare slots, which follow the load from one batch to the next."""

from balancer.policies.spares.choose import LEAST, SCENARIOS, choose_spares

__all__ = ["LEAST", "SCENARIOS", "choose_spares"]
