"""What `eaas status` shows, as this client sees the cluster."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from attention_client.cluster import Cluster

__all__ = ["cluster_status"]


def cluster_status(cluster: Cluster, endpoint: str) -> dict[str, Any]:
    """The status document (architecture, public faces).

    Args:
        cluster: This client's view.
        endpoint: URL of the HTTP endpoint.
    """
    view = cluster.session.view
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
        for m in sorted(view.members.values(), key=lambda m: (m.role.value, m.id))
    ]
    return {
        "epoch": placement.epoch if placement else 0,
        "members": members,
        "coverage": {
            "uncovered": [list(pair) for pair in cluster.uncovered()],
            "min_replicas": _min_replicas(cluster),
        },
        "endpoint": endpoint,
        "model": cluster.shape.model_type,
        "view_age_s": round(view.age_s(time.monotonic()), 3),
    }


def _min_replicas(cluster: Cluster) -> int:
    """Connected replicas of the expert that has fewest."""
    if cluster.placement is None:
        return 0
    view = cluster.view()
    return int(np.min(view.placement.holds_LSE[:, view.usable_S()].sum(axis=1)))
