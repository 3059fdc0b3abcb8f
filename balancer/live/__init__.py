"""Placements that follow the load: what is seen (`hotness`, `speeds`), what follows (`mind`), and when."""

from balancer.live.mind import Proposal, Settings, Situation, weigh

__all__ = ["Proposal", "Settings", "Situation", "weigh"]
