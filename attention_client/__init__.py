"""The attention client: a transformers model whose experts are elsewhere, and its HTTP endpoint."""

from typing import TYPE_CHECKING, Any

from attention_client.cluster import Cluster

if TYPE_CHECKING:
    from attention_client.loading import load

__all__ = ["Cluster", "load"]


def __getattr__(name: str) -> Any:
    # Half of the seconds that this package takes to import are transformers, which only `load` needs.
    if name == "load":
        from attention_client.loading import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
