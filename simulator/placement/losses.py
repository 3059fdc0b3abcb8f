"""Tokens of a replay whose experts a failing node or rack takes along, with all their replicas."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from eaas.nodes import rack_of

__all__ = ["Losses", "node_names"]


def node_names(servers: int, nodes: int, racks: int = 1) -> tuple[str, ...]:
    """Name the node of each server, `RACK/NODE`: servers are dealt evenly to nodes, and nodes to racks."""
    of_S = [s * nodes // servers for s in range(servers)]
    return tuple(f"rack{n * racks // nodes}/node{n}" for n in of_S)


class Losses:
    """Counts, for each node and rack, the tokens that need an expert which only it holds.

    Args:
        nodes: Names of the servers' nodes, `NODE` or `RACK/NODE`.
    """

    def __init__(self, nodes: Sequence[str]) -> None:
        racks = [rack_of(node) for node in nodes]
        self._groups = [
            [[n == name for n in names] for name in set(names)] for names in (nodes, racks)
        ]
        self._lost = [np.zeros(len(groups)) for groups in self._groups]
        self._tokens = 0.0

    def add(self, holds_SE: npt.NDArray[np.bool_], tokens_E: npt.NDArray[np.float64]) -> None:
        """Count one layer's tokens under one placement."""
        self._tokens += float(tokens_E.sum())
        for lost, groups in zip(self._lost, self._groups, strict=True):
            for g, inside_S in enumerate(groups):
                left_E = holds_SE[~np.array(inside_S)].any(axis=0)
                lost[g] += tokens_E[~left_E].sum()

    @property
    def node(self) -> float:
        """Share of the tokens that the worst node takes along; 0.0 without tokens."""
        return float(self._lost[0].max() / self._tokens) if self._tokens else 0.0

    @property
    def rack(self) -> float:
        """Share of the tokens that the worst rack takes along; 0.0 without tokens."""
        return float(self._lost[1].max() / self._tokens) if self._tokens else 0.0
