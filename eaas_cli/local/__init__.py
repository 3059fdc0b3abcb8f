"""A cluster on this machine, for `eaas up`, the benchmarks and the tests."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eaas_cli.local.cluster import LocalCluster

__all__ = ["LocalCluster"]


def __getattr__(name: str) -> Any:
    # Imported on first use, because `eaas --help` and the roles need neither the settings nor numpy.
    if name == "LocalCluster":
        from eaas_cli.local.cluster import LocalCluster

        return LocalCluster
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
