"""Benchmark of lost servers: faults on a running cluster, against the same work without them."""

from benchmarks.failover.run import bench_failover

__all__ = ["bench_failover"]
