"""A whole cluster on this machine: what `eaas up`, the benchmarks and the tests start."""

from eaas.local.cluster import LocalCluster

__all__ = ["LocalCluster"]
