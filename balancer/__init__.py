"""Where the experts are: policies, planner and the placement service."""

from balancer.main import run

__all__ = ["run"]
