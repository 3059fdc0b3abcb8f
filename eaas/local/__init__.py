"""A whole cluster on this machine: what `eaas up`, the benchmarks and the tests start."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eaas.local.cluster import LocalCluster

__all__ = ["LocalCluster"]


def __getattr__(name: str) -> Any:
    # A role that announces its address, or `eaas --help`, needs neither the settings nor numpy.
    if name == "LocalCluster":
        from eaas.local.cluster import LocalCluster

        return LocalCluster
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
