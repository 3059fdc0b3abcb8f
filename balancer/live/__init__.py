"""The balancer's rebalancing by observed load: readings, triggers, cost-benefit evaluation of placements."""
