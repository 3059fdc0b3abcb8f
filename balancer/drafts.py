"""From what servers hold and who they are to the placement that they should have. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from balancer.layout import Holds, Layout, Shares
from balancer.policies.repair import even_shares, restore
from balancer.pool import ServerPool
from eaas.types import Member, MemberState, Placement

__all__ = ["Draft", "has_orphans", "recovered", "repaired", "with_orphans"]


@dataclass(frozen=True, eq=False)
class Draft:
    """A placement without an epoch.

    Attributes:
        servers: Index S.
        holds_LSE: bool.
        shares_LSE: float; above 0 where held, over S they sum to 1.
        layer_order: Layers in the order in which they are to be loaded; the others follow.
    """

    servers: tuple[str, ...]
    holds_LSE: Holds
    shares_LSE: Shares
    layer_order: tuple[int, ...] = ()


def recovered(
    held: Mapping[str, npt.NDArray[np.bool_]], layout: Layout, wanted: Placement | None
) -> Draft:
    """From what each server says that it holds, and from what was wanted when somebody knew.

    Args:
        held: bool (L, E), by server.
        layout: Decides where what was wanted is not for these servers.
        wanted: The last draft of the balancer before; None: nobody knows.
    """
    servers = tuple(held)
    if wanted is not None and set(wanted.servers) == set(servers):
        return Draft(wanted.servers, wanted.holds_LSE, wanted.shares_LSE)
    held_LSE = np.stack(tuple(held.values()), axis=1)
    known_LSE = np.zeros(held_LSE.shape, np.float32)
    if wanted is not None:
        known_LSE = _columns(wanted, servers)[1]
    return Draft(servers, *layout.around(servers, held_LSE, known_LSE))


def has_orphans(current: Placement, pool: ServerPool) -> bool:
    """Whether an expert has lost its last living replica."""
    return not current.holds_LSE[:, _among(current.servers, pool.holders)].any(axis=1).all()


def with_orphans(current: Placement, pool: ServerPool) -> Draft | None:
    """Experts without a living replica are put on servers that are able; nothing else changes.

    On those that serve already, if there are any: a newcomer may take its time, or hang. None where there
    is no such expert.
    """
    if not has_orphans(current, pool):
        return None
    holders = pool.holders
    able = {s: m for s, m in pool.able.items() if m.state is MemberState.SERVING} or pool.able
    servers = tuple(dict.fromkeys((*current.servers, *able)))
    holds_LSE, shares_LSE = _columns(current, servers)
    holds_LSE = restore(holds_LSE, _among(servers, holders), _among(servers, able))
    used = np.flatnonzero(holds_LSE.any(axis=(0, 2)))
    holds_LSE, shares_LSE = holds_LSE[:, used], shares_LSE[:, used]
    # What is new takes as much as if all took the same.
    shares_LSE = np.where(holds_LSE & (shares_LSE == 0), even_shares(holds_LSE), shares_LSE)
    shares_LSE /= shares_LSE.sum(axis=1, keepdims=True)
    return Draft(tuple(servers[s] for s in used), holds_LSE, shares_LSE)


def repaired(
    current: Placement, pool: ServerPool, layout: Layout, now: float, *, is_wanted: bool
) -> Draft | None:
    """Servers that joined get a share, that of those that leave goes to others.

    The return of a server that died is waited for, until its time is over or somebody comes or leaves.
    None where nobody came or left, and the placement is even, or needs not be.

    Args:
        current: The placement now.
        pool: The servers.
        layout: Decides what it is to look like.
        now: Monotonic seconds.
        is_wanted: The placement is as it is for a reason, however uneven.
    """
    staying = pool.staying
    kept = [s for s in current.servers if s in staying]
    gone = [s for s in current.servers if s not in staying]
    awaited = [s for s in gone if pool.is_awaited(s, now)]
    servers = tuple(sorted({*kept, *pool.able}))
    replicas = min(layout.redundancy, len(current.servers))
    is_even = bool((current.holds_LSE.sum(axis=1) == replicas).all())
    is_right = bool(awaited) or is_wanted or not layout.levels or is_even
    if is_right and len(servers) == len(kept) and gone == awaited:
        return None
    return Draft(servers, *layout.around(servers, *_columns(current, servers)))


def _among(servers: tuple[str, ...], some: Mapping[str, Member]) -> npt.NDArray[np.bool_]:
    """Which servers are of these: bool (S)."""
    return np.array([s in some for s in servers], dtype=np.bool_)


def _columns(
    placement: Placement, servers: tuple[str, ...]
) -> tuple[Holds, npt.NDArray[np.float32]]:
    """The placement's arrays for these servers: bool and float32 (L, S, E)."""
    layers, _, experts = placement.holds_LSE.shape
    holds_LSE = np.zeros((layers, len(servers), experts), np.bool_)
    shares_LSE = np.zeros(holds_LSE.shape, np.float32)
    for s, server in enumerate(servers):
        if server in placement.servers:
            place = placement.servers.index(server)
            holds_LSE[:, s] = placement.holds_LSE[:, place]
            shares_LSE[:, s] = placement.shares_LSE[:, place]
    return holds_LSE, shares_LSE
