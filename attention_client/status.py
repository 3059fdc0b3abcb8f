"""The document that `eaas status` shows: the cluster as an HTTP endpoint sees it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from attention_client.cluster import Cluster
from eaas.membership.reachability import fewest_nodes, fewest_replicas, unreachable
from eaas.types import Member, Placement

__all__ = ["cluster_status", "min_nodes", "min_replicas", "status_document"]

_ASK_S = 0.5


def cluster_status(cluster: Cluster, endpoint: str) -> dict[str, Any]:
    """Make the document of `eaas status --json`, served by this client's HTTP endpoint.

    Members come from the monitor or, if it does not answer, from the last view.

    Args:
        cluster: This client's membership.
        endpoint: URL of the HTTP endpoint.
    """
    known = cluster.session.ask_members(_ASK_S) or cluster.session.view.members
    replicas_LE = _least(cluster, cluster.replicas_LE(), known.values(), fewest_replicas)
    nodes_LE = _least(cluster, cluster.nodes_LE(), known.values(), fewest_nodes)
    return status_document(known.values(), cluster.placement, replicas_LE, nodes_LE, endpoint)


def status_document(
    members: Collection[Member],
    placement: Placement | None,
    replicas_LE: npt.NDArray[np.int64] | None,
    nodes_LE: npt.NDArray[np.int64] | None,
    endpoint: str,
) -> dict[str, Any]:
    """Make the document of `eaas status --json` from what an endpoint knows.

    Args:
        members: All members.
        placement: The newest placement; None before the first one.
        replicas_LE: Live replicas of each expert, int64 (L, E); None without a placement.
        nodes_LE: Different nodes of these replicas, int64 (L, E); None without a placement.
        endpoint: URL of the HTTP endpoint.
    """
    cut = unreachable(members)
    rows = [
        {
            "id": m.id,
            "role": m.role.value,
            "pid": m.pid,
            "host": m.host,
            "address": m.address,
            "state": m.state.value,
            "incarnation": m.incarnation,
            "experts": m.experts,
            "in_flight": m.in_flight,
            "unreachable": cut.get(m.id, {}),
        }
        for m in sorted(members, key=lambda m: (m.role.value, m.id))
    ]
    return {
        "epoch": placement.epoch if placement else 0,
        "members": rows,
        "coverage": {
            "uncovered": [] if replicas_LE is None else np.argwhere(replicas_LE == 0).tolist(),
            "min_replicas": 0 if replicas_LE is None else int(replicas_LE.min()),
            "min_nodes": 0 if nodes_LE is None else int(nodes_LE.min()),
        },
        "endpoint": endpoint,
    }


def min_replicas(cluster: Cluster) -> int:
    """Return the connected replicas of the expert with the fewest, for the metrics; 0 without a placement."""
    replicas_LE = cluster.replicas_LE()
    return 0 if replicas_LE is None else int(replicas_LE.min())


def min_nodes(cluster: Cluster) -> int:
    """Return the fewest different nodes of an expert's connected replicas; 0 without a placement."""
    nodes_LE = cluster.nodes_LE()
    return 0 if nodes_LE is None else int(nodes_LE.min())


def _least(
    cluster: Cluster,
    own_LE: npt.NDArray[np.int64] | None,
    members: Iterable[Member],
    fewest: Callable[..., npt.NDArray[np.int64]],
) -> npt.NDArray[np.int64] | None:
    """Return the lesser of this client's counts and those of the others, int64 (L, E); None: no placement."""
    placement = cluster.placement
    # This client's own report may be older than its connections.
    others = [m for m in members if m.id != cluster.client_id]
    if placement is None or own_LE is None or not others:
        return own_LE
    return np.minimum(own_LE, fewest(placement.replicas, placement.servers, others))
