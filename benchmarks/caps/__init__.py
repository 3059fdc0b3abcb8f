"""Decisions of CAPS: whether a strategy can stay on, what a batch costs, a recorded queue run again."""
