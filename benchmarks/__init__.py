"""Benchmarks: ratios of two things measured in one run."""
