"""`eaas autoscale`, its own process: sets the number of servers by their utilisation and token latency."""

from balancer.autoscaler.core import Autoscaler, Decision, Reading

__all__ = ["Autoscaler", "Decision", "Reading"]
