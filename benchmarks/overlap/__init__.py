"""Benchmark of double-batch overlap: decode steps with it, without it, and with `auto`."""
