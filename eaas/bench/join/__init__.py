"""`eaas bench join`: what it takes to bring one more expert server to SERVING, and what others feel of it."""

from eaas.bench.join.run import bench_join

__all__ = ["bench_join"]
