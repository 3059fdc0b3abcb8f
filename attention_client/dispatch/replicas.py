"""The replicas among which dispatch chooses: a placement's shares, sparse and by expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

__all__ = ["ReplicaShares"]

Int = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ReplicaShares:
    """The replicas of each layer and expert. Immutable.

    Shape suffixes: L layers, S servers, E experts, X experts and one (E + 1), N replicas of all layers,
    M more replicas.

    Attributes:
        servers: S.
        first_LX: int32: where each expert's replicas begin in the next two; the next one's begin is the end.
        server_N: int32: their servers, ascending for each expert.
        share_N: float32, positive: this replica's part of its expert's pairs, relative to the others'.
    """

    servers: int
    first_LX: npt.NDArray[np.int32]
    server_N: npt.NDArray[np.int32]
    share_N: npt.NDArray[np.float32]

    @classmethod
    def of(cls, shares_LSE: npt.NDArray[np.float32]) -> Self:
        """Make the replicas of dense shares (L, S, E): those with a positive share."""
        layers, servers, experts = shares_LSE.shape
        layer_N, expert_N, server_N = np.nonzero((shares_LSE > 0).transpose(0, 2, 1))
        count_LE = np.bincount(layer_N * experts + expert_N, minlength=layers * experts)
        first_LX = np.zeros((layers, experts + 1), np.int32)
        ends_LE = count_LE.cumsum().reshape(layers, experts)
        first_LX[:, 1:] = ends_LE
        first_LX[1:, 0] = ends_LE[:-1, -1]
        share_N = shares_LSE[layer_N, server_N, expert_N]
        return cls(
            servers, first_LX, server_N.astype(np.int32), np.ascontiguousarray(share_N, np.float32)
        )

    def __post_init__(self) -> None:
        # Compiled code has checked them once.
        for array in self.first_LX, self.server_N, self.share_N:
            array.setflags(write=False)

    def plus(self, layer_M: Int, server_M: Int, expert_M: Int) -> Self:
        """Return these and more replicas; those that are here already are left out.

        A new one gets the share of an even division, 1 / (number of its expert's replicas here), which at
        most halves the others'.
        """
        servers, experts = self.servers, self.experts
        count_LE = np.diff(self.first_LX, axis=1)
        key_N = np.repeat(np.arange(count_LE.size), count_LE.ravel()) * servers + self.server_N
        key_M = (layer_M * experts + expert_M) * servers + server_M
        key_M = np.setdiff1d(key_M, key_N)
        count_M = count_LE.ravel()[key_M // servers]
        key_N = np.concatenate([key_N, key_M])
        order_N = np.argsort(key_N)
        share_N = np.concatenate([self.share_N, (1 / np.maximum(count_M, 1)).astype(np.float32)])
        begin_X = np.arange(count_LE.size + 1) * servers
        place_X = np.searchsorted(key_N[order_N], begin_X).astype(np.int32)
        rows_LX = np.arange(len(count_LE))[:, None] * experts + np.arange(experts + 1)
        return type(self)(
            servers,
            place_X[rows_LX],
            (key_N[order_N] % servers).astype(np.int32),
            share_N[order_N],
        )

    def on(self, usable_S: npt.NDArray[np.bool_]) -> Self:
        """Return those on usable servers: a tenth of a millisecond for 20,000 replicas."""
        keep_N = usable_S[self.server_N]
        place_X = np.zeros(len(keep_N) + 1, np.int32)
        np.cumsum(keep_N, out=place_X[1:])
        return type(self)(
            self.servers, place_X[self.first_LX], self.server_N[keep_N], self.share_N[keep_N]
        )

    @property
    def experts(self) -> int:
        """E."""
        return int(self.first_LX.shape[1]) - 1
