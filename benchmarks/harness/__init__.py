"""What the benchmarks share: what they measure against, load for it, and tables of the figures."""
