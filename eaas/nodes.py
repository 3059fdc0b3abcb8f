"""Nodes and racks of expert servers: what fails together. Names are `NODE` or `RACK/NODE`. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eaas.types import Member

__all__ = ["different_nodes", "node_of", "rack_of"]


def node_of(member: Member) -> str:
    """Return the name of a member's node: as configured, or its host name."""
    return member.node or member.host


def rack_of(node: str) -> str:
    """Return the rack in a node's name, the part before the last `/`; a node without one is its own rack."""
    return node.rpartition("/")[0] or node


def different_nodes(
    holds_LSE: npt.NDArray[np.bool_], nodes: Sequence[str]
) -> npt.NDArray[np.int64]:
    """Count the different nodes with replicas of each expert: int64 (L, E).

    Args:
        holds_LSE: bool (L, S, E); replicas of the placement, by layer, server and expert.
        nodes: Names, in the order of axis S.
    """
    count_LE = np.zeros((holds_LSE.shape[0], holds_LSE.shape[2]), np.int64)
    for name in dict.fromkeys(nodes):
        on_S = np.array([node == name for node in nodes], np.bool_)
        count_LE += holds_LSE[:, on_S].any(axis=1)
    return count_LE
