"""Benchmark of the placement policies: planning time by policy and size."""

from benchmarks.policies.run import bench_policies
from benchmarks.policies.sizes import SIZES, Size, parse_size

__all__ = ["SIZES", "Size", "bench_policies", "parse_size"]
