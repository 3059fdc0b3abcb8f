"""The policy `spread`: every expert equally often, a lost server's load shared by all; ignores load."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from balancer.policies import compiled
from balancer.policies.compact import Compact
from balancer.policies.sparse import Layout
from balancer.policies.types import Int, Problem

__all__ = ["spread", "spread_evenly"]


def spread(
    num_layers: int, num_experts: int, servers: int, redundancy: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.float32]]:
    """Place each expert on `redundancy` servers, levelled within and across layers.

    Within a layer the servers' replica counts differ by at most 1. Pairs of servers that share experts vary
    between experts and layers, so that a lost server's load falls on all others. Deterministic.

    Args:
        num_layers: MoE layers (L).
        num_experts: Logical experts per layer (E).
        servers: Expert servers (S).
        redundancy: Servers that hold each expert (R), no more than there are.

    Returns:
        holds_LSE: bool (L, S, E).
        shares_LSE: float32 (L, S, E); 1/R where held, else 0.

    Time O(L * E * R * S), memory O(L * S * E).
    """
    count_LE = np.full((num_layers, num_experts), redundancy)
    # More slots than any server gets, so that only the levelling limits servers.
    slots_LS = np.full((num_layers, servers), num_experts * redundancy)
    holds_LSE, shares_LSE = _deal(count_LE, slots_LS).dense()
    return holds_LSE, shares_LSE.astype(np.float32)


def spread_evenly(problem: Problem) -> Layout:
    """Lay out over all slots, with experts' replica counts within 1 of each other, regardless of load.

    The experts with one replica more rotate from layer to layer. Servers of different sizes are filled to
    the same number of free slots.

    Time O(L * P * S), memory O(L * P + S * S).
    """
    experts = problem.experts
    each_L, more_L = np.divmod(problem.slots_L, experts)
    turn_LE = (np.arange(experts) - np.cumsum(more_L)[:, None]) % experts
    count_LE: Int = each_L[:, None] + (turn_LE < more_L[:, None])
    return _deal(count_LE, problem.slots_LS)


def _deal(count_LE: Int, slots_LS: Int) -> Layout:
    replicas = int(count_LE.sum(axis=1).max(initial=0))
    server_LP = np.full((len(count_LE), replicas), -1, dtype=np.int32)
    compiled.spread(count_LE, slots_LS, server_LP)
    return Compact(count_LE, server_LP, slots_LS.shape[1]).layout()
