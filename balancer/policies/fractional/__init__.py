"""The default policy, `fractional`: placements for clients that split each batch over replicas."""

from balancer.policies.fractional.balancer import FractionalBalancer
from balancer.policies.fractional.layout import fractional

__all__ = ["FractionalBalancer", "fractional"]
