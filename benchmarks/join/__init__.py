"""Benchmark of a joining expert server: time until it serves, and effect on other clients."""

from benchmarks.join.run import bench_join

__all__ = ["bench_join"]
