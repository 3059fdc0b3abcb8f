"""Placements that follow the load: observations, cost-benefit evaluation, triggers."""

from balancer.live.cost_benefit import Proposal, Settings, Situation, weigh

__all__ = ["Proposal", "Settings", "Situation", "weigh"]
