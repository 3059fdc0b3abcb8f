"""A layout within the memory that servers have: coverage first, then redundancy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from balancer.policies.types import Holds, Int
from eaas.words import counted

__all__ = ["NoRoomError", "fit", "without_spares"]


class NoRoomError(ValueError):
    """Not every expert can have a server: there is not memory enough. Says how much is missing."""


def fit(wanted_LSE: Holds, held_LSE: Holds, room_S: Int) -> Holds:
    """The wanted layout, with as few changes as it takes to keep each server within its room.

    Args:
        wanted_LSE: bool (L, S, E); each expert has a server.
        held_LSE: bool (L, S, E); what servers hold now.
        room_S: int64 (S); replicas that they have memory for, over all layers.

    Returns:
        holds_LSE: Each expert has a server; no server has more than its room.

    Raises:
        NoRoomError: There is less room than there are experts.

    Time O(changes * L * E).
    """
    layers, servers, experts = wanted_LSE.shape
    usable = int(np.minimum(room_S, layers * experts).sum())
    if usable < layers * experts:
        raise NoRoomError(
            f"{counted(layers * experts, 'expert')}, and memory for {usable} on "
            f"{counted(servers, 'server')}: raise expert_server.memory_bytes, or start another server"
        )
    holds_LSE = wanted_LSE.copy()
    free_S = room_S - holds_LSE.sum(axis=(0, 2))
    # Step 1: further replicas of an expert are given up, of those that have most of them first.
    for server in np.flatnonzero(free_S < 0):
        free_S[server] += _drop_spares(holds_LSE, held_LSE, int(server), int(-free_S[server]))
    # Step 2: what is the only one moves to where there is room, or where that can be made.
    for server in np.flatnonzero(free_S < 0):
        while free_S[server] < 0:
            layer, expert = _movable(holds_LSE, held_LSE, int(server))
            target = _with_room(holds_LSE, held_LSE, free_S)
            holds_LSE[layer, server, expert] = False
            holds_LSE[layer, target, expert] = True
            free_S[server] += 1
            free_S[target] -= 1
    # Step 3: experts get back what they lost where there is still room.
    missing_LE = wanted_LSE.sum(axis=1) - holds_LSE.sum(axis=1)
    for layer, expert in np.argwhere(missing_LE > 0):
        for _ in range(missing_LE[layer, expert]):
            possible_S = ~holds_LSE[layer, :, expert] & (free_S > 0)
            if possible_S.any():
                order = np.lexsort((-free_S, ~held_LSE[layer, :, expert], ~possible_S))
                holds_LSE[layer, order[0], expert] = True
                free_S[order[0]] -= 1
    return holds_LSE


def without_spares(holds_LSE: Holds, living_S: Holds, server: int, count: int) -> tuple[Holds, int]:
    """A layout in which a server has up to `count` replicas less, of experts that others have, too.

    Args:
        holds_LSE: bool (L, S, E).
        living_S: bool (S); replicas elsewhere do not count.
        server: Who.
        count: How many.

    Returns:
        holds_LSE, and how many less it has.
    """
    less_LSE = holds_LSE.copy()
    living_LSE = holds_LSE & living_S[:, None]
    dropped = _drop_spares(living_LSE, living_LSE, server, count)
    less_LSE[:, server] = living_LSE[:, server]
    return less_LSE, dropped


def _drop_spares(holds_LSE: Holds, held_LSE: Holds, server: int, count: int) -> int:
    """Takes up to so many replicas from a server, in place; says how many."""
    replicas_LE = holds_LSE.sum(axis=1)
    spare_LE = holds_LSE[:, server] & (replicas_LE > 1)
    places = np.argwhere(spare_LE)
    # Each is looked at once: an expert has one replica here.
    order = np.lexsort((held_LSE[:, server][spare_LE], -replicas_LE[spare_LE]))[:count]
    for layer, expert in places[order]:
        holds_LSE[layer, server, expert] = False
    return len(order)


def _movable(holds_LSE: Holds, held_LSE: Holds, server: int) -> npt.NDArray[np.int64]:
    """A replica of a server, one that is not there yet if there is such."""
    new_LE = holds_LSE[:, server] & ~held_LSE[:, server]
    return np.asarray(np.argwhere(new_LE if new_LE.any() else holds_LSE[:, server])[0])


def _with_room(holds_LSE: Holds, held_LSE: Holds, free_S: Int) -> int:
    """The server with the most room; if there is none, one that can give a spare replica up."""
    if free_S.max() <= 0:
        # Where nobody has room, and somebody more than that, an expert has two replicas.
        for server in np.flatnonzero(free_S == 0):
            if _drop_spares(holds_LSE, held_LSE, int(server), 1):
                free_S[server] += 1
                break
    return int(free_S.argmax())
