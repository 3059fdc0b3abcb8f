"""Placements that follow the load: observations, cost-benefit evaluation, triggers."""
