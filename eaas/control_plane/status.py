"""The document that `eaas status` shows: the cluster as an HTTP endpoint sees it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from eaas.membership.reachability import unreachable
from eaas.types import Member, Placement

__all__ = ["status_document"]


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
