"""Placements made for the split of each batch: every server exactly as full as its speed allows."""

from balancer.policies.fractional.balancer import FractionalBalancer
from balancer.policies.fractional.layout import fractional

__all__ = ["FractionalBalancer", "fractional"]
