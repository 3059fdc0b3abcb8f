"""From what servers hold and who they are to the placement that they should have. Pure functions.

Each gives (servers, holds_LSE) of a placement, or None where there is nothing to change.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from balancer.policies.repair import repair, restore
from balancer.pool import ServerPool
from eaas.types import Member, Placement

__all__ = ["Draft", "recovered", "repaired", "with_orphans"]

Draft = tuple[tuple[str, ...], npt.NDArray[np.bool_]]


def recovered(held: Mapping[str, npt.NDArray[np.bool_]], redundancy: int) -> Draft:
    """From what each server says that it holds: bool (L, E)."""
    return tuple(held), repair(np.stack(tuple(held.values()), axis=1), redundancy)


def with_orphans(current: Placement, pool: ServerPool) -> Draft | None:
    """Experts without a living replica are put on servers that are able; nothing else changes."""
    able, holders = pool.able, pool.holders
    if current.holds_LSE[:, _among(current.servers, holders)].any(axis=1).all():
        return None
    servers = tuple(dict.fromkeys((*current.servers, *able)))
    holds_LSE = restore(_columns(current, servers), _among(servers, holders), _among(servers, able))
    used = np.flatnonzero(holds_LSE.any(axis=(0, 2)))
    return tuple(servers[s] for s in used), holds_LSE[:, used]


def repaired(current: Placement, pool: ServerPool, redundancy: int, now: float) -> Draft | None:
    """Servers that joined get a share, that of those that leave goes to others, all are level again.

    The return of a server that died is waited for, until its time is over or somebody comes or leaves.
    """
    staying = pool.staying
    kept = [s for s in current.servers if s in staying]
    gone = [s for s in current.servers if s not in staying]
    awaited = [s for s in gone if pool.is_awaited(s, now)]
    servers = tuple(sorted({*kept, *pool.able}))
    replicas = min(redundancy, len(current.servers))
    is_right = bool(awaited) or bool((current.holds_LSE.sum(axis=1) == replicas).all())
    if is_right and len(servers) == len(kept) and gone == awaited:
        return None
    return servers, repair(_columns(current, servers), redundancy)


def _among(servers: tuple[str, ...], some: Mapping[str, Member]) -> npt.NDArray[np.bool_]:
    """Which servers are of these: bool (S)."""
    return np.array([s in some for s in servers], dtype=np.bool_)


def _columns(placement: Placement, servers: tuple[str, ...]) -> npt.NDArray[np.bool_]:
    """The placement's arrays for these servers: bool (L, S, E)."""
    layers, _, experts = placement.holds_LSE.shape
    columns = [
        placement.holds_LSE[:, placement.servers.index(s)]
        if s in placement.servers
        else np.zeros((layers, experts), dtype=np.bool_)
        for s in servers
    ]
    return np.stack(columns, axis=1)
