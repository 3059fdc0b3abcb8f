"""The attention client process: a transformers model with remote experts, and its HTTP endpoint."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attention_client.cluster import Cluster
    from attention_client.engines.transformers.loading import load

__all__ = ["Cluster", "load"]


def __getattr__(name: str) -> Any:
    # Import lazily: both take seconds (torch, transformers), and the simulator needs only the scheduler.
    if name == "Cluster":
        from attention_client.cluster import Cluster

        return Cluster
    if name == "load":
        from attention_client.engines.transformers.loading import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
