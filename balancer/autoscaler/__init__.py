"""Autoscaler: sets the number of expert servers by their utilisation and the token latency."""

from balancer.autoscaler.core import Autoscaler, Decision, Reading

__all__ = ["Autoscaler", "Decision", "Reading"]
