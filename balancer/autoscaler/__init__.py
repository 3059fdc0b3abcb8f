"""Autoscaler: the number of expert servers, from their utilisation and the token latency."""

from balancer.autoscaler.core import Autoscaler, Decision, Reading

__all__ = ["Autoscaler", "Decision", "Reading"]
