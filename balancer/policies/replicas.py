"""A layout's replicas one by one: layouts are sparse, and most sums need only what is held."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from balancer.policies.types import Float, Holds, Int, Shares

__all__ = ["Replicas"]


@dataclass(frozen=True, eq=False)
class Replicas:
    """Which server holds which expert of which layer.

    Attributes:
        layer_R, server_R, expert_R: int64 each.
        shape: L, S and E.
    """

    layer_R: Int
    server_R: Int
    expert_R: Int
    shape: tuple[int, int, int]

    @classmethod
    def of(cls, holds_LSE: Holds) -> Replicas:
        """From a dense layout. Time O(L * S * E / 8)."""
        layers, servers, experts = holds_LSE.shape
        # Much faster than `nonzero` of three dimensions.
        row_R, expert_R = np.divmod(np.flatnonzero(holds_LSE), experts)
        layer_R, server_R = np.divmod(row_R, servers)
        return cls(layer_R, server_R, expert_R, (layers, servers, experts))

    @cached_property
    def count_LE(self) -> Int:
        """int64 (L, E): replicas of each expert."""
        layers, _, experts = self.shape
        count_X = np.bincount(self.layer_R * experts + self.expert_R, minlength=layers * experts)
        return count_X.reshape(layers, experts)

    @property
    def count_LS(self) -> Int:
        """int64 (L, S): replicas on each server."""
        layers, servers, _ = self.shape
        count_X = np.bincount(self.layer_R * servers + self.server_R, minlength=layers * servers)
        return count_X.reshape(layers, servers)

    def holds(self) -> Holds:
        """bool (L, S, E)."""
        holds_LSE = np.zeros(self.shape, dtype=np.bool_)
        holds_LSE[self.layer_R, self.server_R, self.expert_R] = True
        return holds_LSE

    def equal_shares(self) -> Shares:
        """float64 (L, S, E): 1 / (servers that hold the expert) where held."""
        shares_LSE = np.zeros(self.shape)
        share_R = 1.0 / self.count_LE[self.layer_R, self.expert_R]
        shares_LSE[self.layer_R, self.server_R, self.expert_R] = share_R
        return shares_LSE

    def server_load(self, load_LE: Float, shares_LSE: Shares | None = None) -> Float:
        """float64 (L, S): load of each server; with equal shares if none are given."""
        layers, servers, _ = self.shape
        if shares_LSE is None:
            part_LE = load_LE / np.maximum(self.count_LE, 1)
            part_R = part_LE[self.layer_R, self.expert_R]
        else:
            load_R = load_LE[self.layer_R, self.expert_R]
            part_R = load_R * shares_LSE[self.layer_R, self.server_R, self.expert_R]
        sums = np.bincount(self.layer_R * servers + self.server_R, part_R, layers * servers)
        return np.asarray(sums, dtype=np.float64).reshape(layers, servers)
