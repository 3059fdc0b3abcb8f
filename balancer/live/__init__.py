"""Rebalancing by observed load: readings, triggers, and the cost-benefit evaluation of new placements."""
