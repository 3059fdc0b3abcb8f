"""Nodes and racks of expert servers: what fails together. Names are `NODE` or `RACK/NODE`. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eaas.replicas import Replicas
from eaas.types import Member

__all__ = ["different_nodes", "node_of", "rack_of"]


def node_of(member: Member) -> str:
    """Return the name of a member's node: as configured, or its host name."""
    return member.node or member.host


def rack_of(node: str) -> str:
    """Return the rack in a node's name, the part before the last `/`; a node without one is its own rack."""
    return node.rpartition("/")[0] or node


def different_nodes(
    replicas: Replicas, nodes: Sequence[str], on_S: npt.NDArray[np.bool_] | None = None
) -> npt.NDArray[np.int64]:
    """Count the different nodes with replicas of each expert: int64 (L, E).

    Args:
        replicas: The placement's.
        nodes: Names, in the order of the servers.
        on_S: bool (S): servers that count; None: all.
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(nodes))}
    node_S = np.array([numbers[node] for node in nodes], np.int64)
    return replicas.groups_LE(node_S, np.ones(len(nodes), np.bool_) if on_S is None else on_S)
