"""How well the servers that an attention client is connected to cover the experts, for its metrics."""

from __future__ import annotations

from attention_client.cluster import Cluster

__all__ = ["min_nodes", "min_replicas"]


def min_replicas(cluster: Cluster) -> int:
    """Return the connected replicas of the expert with the fewest, for the metrics; 0 without a placement."""
    replicas_LE = cluster.replicas_LE()
    return 0 if replicas_LE is None else int(replicas_LE.min())


def min_nodes(cluster: Cluster) -> int:
    """Return the fewest different nodes of an expert's connected replicas; 0 without a placement."""
    nodes_LE = cluster.nodes_LE()
    return 0 if nodes_LE is None else int(nodes_LE.min())
