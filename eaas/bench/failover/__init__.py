"""What a lost server costs: faults on a running cluster, against the same work without them."""

from eaas.bench.failover.run import bench_failover

__all__ = ["bench_failover"]
