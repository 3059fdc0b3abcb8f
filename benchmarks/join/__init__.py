"""Time for a new expert server to serve, and its effect on other clients."""

from benchmarks.join.run import bench_join

__all__ = ["bench_join"]
