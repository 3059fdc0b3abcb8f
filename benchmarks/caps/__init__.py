"""Benchmarks of CAPS (batch selection): judge a strategy, fit the cost of a step, replay a recorded queue."""
