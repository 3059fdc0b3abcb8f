"""`eaas bench policies`: how long planning takes, by policy and size."""

from eaas.bench.policies.run import bench_policies
from eaas.bench.policies.sizes import SIZES, Size, parse_size

__all__ = ["SIZES", "Size", "bench_policies", "parse_size"]
