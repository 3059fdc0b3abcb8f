"""What a placement that changes costs those who are served meanwhile (`eaas bench rebalance`)."""

from eaas.bench.rebalance.run import bench_rebalance

__all__ = ["bench_rebalance"]
