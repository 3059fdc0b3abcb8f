"""Layouts inside policies, by expert: replica counts, and the list of their servers.

Policies that try many placements keep them in this form, and convert the last one to a layout by server.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from balancer.policies import compiled
from balancer.policies.sparse import Layout
from balancer.policies.types import Float, Int

__all__ = ["Compact", "place", "refine", "replicate"]


@dataclass(frozen=True, eq=False)
class Compact:
    """A layout by expert: which servers hold it.

    Attributes:
        count_LE: int64 (L, E), at least 1.
        server_LP: int32 (L, P): servers of expert 0's replicas, then of expert 1's, and so on; -1 for a
            replica that fits on no server. P is the highest sum of counts.
        servers: S.
    """

    count_LE: Int
    server_LP: npt.NDArray[np.int32]
    servers: int

    def layout(self) -> Layout:
        """Convert to a layout, with equal shares for all replicas of an expert."""
        layers, experts = self.count_LE.shape
        placed = int(np.count_nonzero(self.server_LP[self._used_LP] >= 0))
        made = Layout.empty((layers, self.servers, experts), placed)
        compiled.sparse_of_compact(self.count_LE, self.server_LP, *made.arrays)
        return made

    @property
    def _used_LP(self) -> npt.NDArray[np.bool_]:
        """bool (L, P): the columns that the layer's replicas take."""
        used_LP: npt.NDArray[np.bool_] = (
            np.arange(self.server_LP.shape[1]) < self.count_LE.sum(axis=1)[:, None]
        )
        return used_LP


def replicate(load_LE: Float, total_L: Int, cap: int) -> Int:
    """int64 (L, E): replica counts of experts; each further replica goes to the highest load per replica.

    The highest load per replica is then as low as `total_L` replicas allow (EPLB, step 2). No expert gets
    more than `cap`. Time O(L * (E + extra * log E)).
    """
    layers, experts = load_LE.shape
    count_LE = np.empty((layers, experts), dtype=np.int64)
    none = np.empty((layers, 0), dtype=np.int64)
    extra_L = np.ascontiguousarray(total_L - experts)
    compiled.replicate(load_LE, extra_L, cap, False, count_LE, none)
    return count_LE


def place(load_LE: Float, count_LE: Int, slots_LS: Int, speeds_S: Float) -> Compact:
    """Pack replicas, heaviest first, on the server with the least load / speed that has a slot.

    Replicas of one expert get different servers. If all servers with a free slot have the expert, another
    expert makes room; if that is impossible, the replica is left out.

    Args:
        load_LE: float64 (L, E).
        count_LE: int64 (L, E); no more in a layer than slots, no more than S of an expert.
        slots_LS: int64 (L, S); E at most.
        speeds_S: float64 (S).

    Time O(L * (E + P) * log(E + S)) unless slots get scarce for many replicas of one expert.
    """
    replicas = int(count_LE.sum(axis=1).max())
    server_LP = np.full((len(load_LE), replicas), -1, dtype=np.int32)
    compiled.place(load_LE, count_LE[None], slots_LS[None], speeds_S, False, server_LP[None])
    return Compact(count_LE, server_LP, slots_LS.shape[1])


def refine(placed: Compact, load_LE: Float, speeds_S: Float, budget: int) -> Compact:
    """Exchange replicas between the server with the peak load and others while that lowers the peak.

    The partner is the least loaded of the 16 least loaded servers with which an exchange lowers the higher
    load of the two. Servers keep their number of replicas, and replicas of one expert stay apart.

    Args:
        placed: The start.
        load_LE: float64 (L, E).
        speeds_S: float64 (S).
        budget: Most exchanges per layer.

    Time O(L * budget * (S + (P / S)^2)).
    """
    server_LP = placed.server_LP.copy()
    compiled.refine(load_LE, placed.count_LE, speeds_S, budget, server_LP)
    return Compact(placed.count_LE, server_LP, placed.servers)
