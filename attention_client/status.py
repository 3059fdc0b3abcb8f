"""What `eaas status` shows, as this client sees the cluster."""

from __future__ import annotations

from typing import Any

import numpy as np

from attention_client.cluster import Cluster

__all__ = ["cluster_status", "min_replicas"]

_ASK_S = 0.5


def cluster_status(cluster: Cluster, endpoint: str) -> dict[str, Any]:
    """The document of `eaas status --json`.

    Members are asked of the monitor; where it does not answer, they are those of the last view.

    Args:
        cluster: This client's membership.
        endpoint: URL of the HTTP endpoint.
    """
    known = cluster.session.ask_members(_ASK_S) or cluster.session.view.members
    placement = cluster.placement
    members = [
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
        }
        for m in sorted(known.values(), key=lambda m: (m.role.value, m.id))
    ]
    return {
        "epoch": placement.epoch if placement else 0,
        "members": members,
        "coverage": {
            "uncovered": [list(pair) for pair in cluster.uncovered()],
            "min_replicas": min_replicas(cluster),
        },
        "endpoint": endpoint,
    }


def min_replicas(cluster: Cluster) -> int:
    """Connected replicas of the expert that has fewest."""
    if cluster.placement is None:
        return 0
    view = cluster.view()
    return int(np.min(view.placement.holds_LSE[:, view.usable_S()].sum(axis=1)))
