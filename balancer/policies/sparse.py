"""Sparse layouts: the replicas of each server and layer, as the rows of a CSR matrix.

A server has a few of a layer's experts. With 60 layers, 4,000 servers and 512 experts, dense shares would
take 1 GB and dense holds 0.1 GB; the 480,000 replicas of two slots a server take 8 MB. Policies return, and
plans keep, sparse layouts. Dense arrays are views for callers with small clusters.
Shape suffixes: L layers, S servers, E experts, X rows and one (L x S + 1), N replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from balancer.policies import compiled

__all__ = ["Layout"]

Holds = npt.NDArray[np.bool_]
Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Layout:
    """Which server holds which experts of a layer, and which shares of their loads it takes.

    Attributes:
        shape: (L, S, E).
        first_X: int64 (L * S + 1): begin of each server's row in the next two, layer after layer; the
            last is N.
        expert_N: int32: the experts of each row, ascending.
        share_N: float64: this replica's share of its expert's load; an expert's shares sum to 1.
    """

    shape: tuple[int, int, int]
    first_X: Int
    expert_N: npt.NDArray[np.int32]
    share_N: Float

    @classmethod
    def of(cls, holds_LSE: Holds, shares_LSE: npt.NDArray[np.floating] | None = None) -> Layout:
        """Make a layout from dense arrays; an expert's replicas have equal shares by default."""
        layers, servers, experts = holds_LSE.shape
        made = cls.empty((layers, servers, experts), int(np.count_nonzero(holds_LSE)))
        shares = None if shares_LSE is None else np.ascontiguousarray(shares_LSE, np.float64)
        compiled.sparse_of_holds(np.ascontiguousarray(holds_LSE), shares, *made.arrays)
        return made

    @classmethod
    def of_replicas(
        cls,
        shape: tuple[int, int, int],
        row_R: Int,
        expert_R: Int,
        share_R: Float,
    ) -> Layout:
        """Make a layout of replicas in any order; two of an expert on one server add up to one.

        Args:
            shape: (L, S, E).
            row_R, expert_R: Their row (layer * S + server) and expert.
            share_R: Their shares.
        """
        key_R = row_R * shape[2] + expert_R
        order_R = np.argsort(key_R)
        sorted_R = key_R[order_R]
        is_first_R = np.diff(sorted_R, prepend=-1) > 0
        key_N = sorted_R[is_first_R]
        share_N = np.zeros(len(key_N))
        np.add.at(share_N, np.cumsum(is_first_R) - 1, share_R[order_R])
        first_X = np.searchsorted(key_N, np.arange(shape[0] * shape[1] + 1) * shape[2])
        return cls(shape, first_X.astype(np.int64), (key_N % shape[2]).astype(np.int32), share_N)

    @classmethod
    def empty(cls, shape: tuple[int, int, int], replicas: int) -> Layout:
        """Make a layout with room for so many replicas, to be filled."""
        rows = shape[0] * shape[1]
        return cls(
            shape,
            np.zeros(rows + 1, np.int64),
            np.empty(replicas, np.int32),
            np.empty(replicas, np.float64),
        )

    @classmethod
    def joined(cls, parts: Sequence[Layout]) -> Layout:
        """Join the layers of layouts with the same servers and experts."""
        layers = sum(part.shape[0] for part in parts)
        sizes = np.concatenate([np.diff(part.first_X) for part in parts])
        return cls(
            (layers, *parts[0].shape[1:]),
            np.concatenate([[0], np.cumsum(sizes)]),
            np.concatenate([part.expert_N for part in parts]),
            np.concatenate([part.share_N for part in parts]),
        )

    def __len__(self) -> int:
        """Return the number of replicas, over all layers."""
        return len(self.expert_N)

    @property
    def arrays(self) -> tuple[Int, npt.NDArray[np.int32], Float]:
        """The three arrays, for the compiled loops."""
        return self.first_X, self.expert_N, self.share_N

    def part(self, begin: int, end: int) -> Layout:
        """Return some of the layers, begin to end - 1, in the same memory."""
        servers = self.shape[1]
        first_X = self.first_X[begin * servers : end * servers + 1]
        here = slice(int(first_X[0]), int(first_X[-1]))
        shape = (end - begin, *self.shape[1:])
        return Layout(shape, first_X - first_X[0], self.expert_N[here], self.share_N[here])

    def server_load(self, load_LE: Float) -> Float:
        """float64 (L, S): each server's load in each layer. Time O(L * S + N)."""
        layer_N = np.repeat(np.arange(self.shape[0]), np.diff(self.first_X[:: self.shape[1]]))
        load_N = load_LE.ravel()[layer_N * self.shape[2] + self.expert_N] * self.share_N
        load_X = np.bincount(self.row_N, load_N, minlength=len(self.first_X) - 1)
        return load_X.reshape(self.shape[:2]).astype(np.float64, copy=False)

    def added_to(self, before: Layout) -> Int:
        """int64 (L): replicas in each layer that an earlier layout of this shape lacks. Time O(L * S + N)."""
        new_X = np.empty_like(self.first_X)
        compiled.sparse_new(self.first_X, self.expert_N, before.first_X, before.expert_N, new_X)
        by_layer: Int = new_X[:-1].reshape(self.shape[:2]).sum(axis=1)
        return by_layer

    @property
    def row_N(self) -> Int:
        """int64 (N): the row (layer * S + server) of each replica."""
        return np.repeat(np.arange(len(self.first_X) - 1), np.diff(self.first_X))

    @property
    def count_LE(self) -> Int:
        """int64 (L, E): replicas of each expert."""
        layers, servers, experts = self.shape
        at_N = self.row_N // servers * experts + self.expert_N
        return np.bincount(at_N, minlength=layers * experts).reshape(layers, experts)

    @property
    def count_LS(self) -> Int:
        """int64 (L, S): replicas on each server."""
        return np.diff(self.first_X).reshape(self.shape[:2])

    @cached_property
    def holds_LSE(self) -> Holds:
        """bool (L, S, E), dense; kept."""
        return self._dense(np.bool_, True)

    @cached_property
    def shares_LSE(self) -> Float:
        """float64 (L, S, E), dense: 0 where not held; kept."""
        shares_LSE: Float = self._dense(np.float64, self.share_N)
        return shares_LSE

    def dense(self) -> tuple[Holds, Float]:
        """Return dense holds and shares, which the caller may change."""
        return self._dense(np.bool_, True), self._dense(np.float64, self.share_N)

    def _dense(self, dtype: npt.DTypeLike, value: object) -> npt.NDArray:  # type: ignore[type-arg]
        dense_LSE = np.zeros(self.shape, dtype)
        dense_LSE.reshape(-1, self.shape[2])[self.row_N, self.expert_N] = value
        return dense_LSE
