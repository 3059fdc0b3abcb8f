"""How many expert servers there are to be, from how busy they are and how long tokens take."""

from balancer.autoscaler.core import Autoscaler, Decision, Reading

__all__ = ["Autoscaler", "Decision", "Reading"]
