"""Fits the planner's layouts into servers' memory; covering every expert comes first, redundancy second."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from balancer.policies.types import Holds, Int
from eaas.counted import counted

__all__ = ["NoCapacityError", "fit", "without_spares"]


_GB = 1e9


class NoCapacityError(ValueError):
    """The servers lack memory for one replica of every expert. The message says how much is missing."""


def fit(wanted_LSE: Holds, held_LSE: Holds, capacity_S: Int, expert_bytes: int = 0) -> Holds:
    """Return a candidate's wanted layout with the fewest changes that keep servers within their capacity.

    Args:
        wanted_LSE: bool (L, S, E); each expert has a server.
        held_LSE: bool (L, S, E); what servers hold now.
        capacity_S: int64 (S); replicas that they have memory for, over all layers.
        expert_bytes: Memory of a replica, for the message; 0: unknown.

    Returns:
        holds_LSE: Each expert has a server; no server exceeds its capacity.

    Raises:
        NoCapacityError: The capacity is below the number of experts.

    Time O(changes * L * E).
    """
    layers, servers, experts = wanted_LSE.shape
    usable = int(np.minimum(capacity_S, layers * experts).sum())
    if usable < layers * experts:
        raise NoCapacityError(_lack(layers * experts, usable, servers, expert_bytes))
    holds_LSE = wanted_LSE.copy()
    free_S = capacity_S - holds_LSE.sum(axis=(0, 2))
    # Step 1: overfull servers give up spare replicas, of the experts with the most replicas first.
    for server in np.flatnonzero(free_S < 0):
        free_S[server] += _drop_spares(holds_LSE, held_LSE, int(server), int(-free_S[server]))
    # Step 2: sole replicas move to servers that have capacity or can make some.
    for server in np.flatnonzero(free_S < 0):
        while free_S[server] < 0:
            layer, expert = _movable(holds_LSE, held_LSE, int(server))
            target = _roomiest(holds_LSE, held_LSE, free_S)
            holds_LSE[layer, server, expert] = False
            holds_LSE[layer, target, expert] = True
            free_S[server] += 1
            free_S[target] -= 1
    # Step 3: experts get lost replicas back while there is capacity.
    missing_LE = wanted_LSE.sum(axis=1) - holds_LSE.sum(axis=1)
    for layer, expert in np.argwhere(missing_LE > 0):
        for _ in range(missing_LE[layer, expert]):
            possible_S = ~holds_LSE[layer, :, expert] & (free_S > 0)
            if possible_S.any():
                order = np.lexsort((-free_S, ~held_LSE[layer, :, expert], ~possible_S))
                holds_LSE[layer, order[0], expert] = True
                free_S[order[0]] -= 1
    return holds_LSE


def _lack(wanted: int, usable: int, servers: int, expert_bytes: int) -> str:
    """Say how much memory is missing, and how many servers like these would have it."""
    more = -(-(wanted - usable) * servers // max(usable, 1))
    sizes = (
        f"{wanted * expert_bytes / _GB:.1f} GB of expert memory for one replica of each, the servers "
        f"have {usable * expert_bytes / _GB:.1f} GB: "
        if expert_bytes
        else ""
    )
    return (
        f"{counted(wanted, 'expert')}, and memory for {usable} on {counted(servers, 'server')}: {sizes}"
        f"raise expert_server.memory_bytes, or start {counted(more, 'more server')} of this size"
    )


def without_spares(holds_LSE: Holds, living_S: Holds, server: int, count: int) -> tuple[Holds, int]:
    """Make room for orphans: drop up to `count` replicas of a server that other live servers also hold.

    Args:
        holds_LSE: bool (L, S, E).
        living_S: bool (S); only replicas on these servers count.
        server: Index of the server.
        count: Most replicas to drop.

    Returns:
        holds_LSE, and the number of dropped replicas.
    """
    less_LSE = holds_LSE.copy()
    living_LSE = holds_LSE & living_S[:, None]
    dropped = _drop_spares(living_LSE, living_LSE, server, count)
    less_LSE[:, server] = living_LSE[:, server]
    return less_LSE, dropped


def _drop_spares(holds_LSE: Holds, held_LSE: Holds, server: int, count: int) -> int:
    """Drop up to `count` spare replicas of a server, in place; return how many."""
    replicas_LE = holds_LSE.sum(axis=1)
    spare_LE = holds_LSE[:, server] & (replicas_LE > 1)
    places = np.argwhere(spare_LE)
    # One pass is enough: an expert has one replica here.
    order = np.lexsort((held_LSE[:, server][spare_LE], -replicas_LE[spare_LE]))[:count]
    for layer, expert in places[order]:
        holds_LSE[layer, server, expert] = False
    return len(order)


def _movable(holds_LSE: Holds, held_LSE: Holds, server: int) -> npt.NDArray[np.int64]:
    """Choose a replica of a server to move, preferably one that is not loaded yet."""
    new_LE = holds_LSE[:, server] & ~held_LSE[:, server]
    return np.asarray(np.argwhere(new_LE if new_LE.any() else holds_LSE[:, server])[0])


def _roomiest(holds_LSE: Holds, held_LSE: Holds, free_S: Int) -> int:
    """Choose the server with the most free capacity; if none has any, one that can drop a spare replica."""
    if free_S.max() <= 0:
        # As no server has free capacity and one is overfull, some expert has two replicas.
        for server in np.flatnonzero(free_S == 0):
            if _drop_spares(holds_LSE, held_LSE, int(server), 1):
                free_S[server] += 1
                break
    return int(free_S.argmax())
