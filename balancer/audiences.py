"""Replicas for clients that do not reach all servers (`balancer.reach`). No I/O, no clock."""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Set as AbstractSet

import numpy as np
import numpy.typing as npt

from balancer.drafts import Draft
from balancer.live.backups import BACKUP_SHARE
from balancer.pool import ServerPool
from eaas.types import Placement

__all__ = ["Audiences", "servers_of", "with_audiences"]

Holds = npt.NDArray[np.bool_]


class Audiences:
    """Adds replicas to drafts while there are audiences, and has them dropped afterwards.

    Args:
        pool: The servers.
        redundancy: Gives the servers that hold each expert; an operator may change it.

    Attributes:
        plain: The current placement without what was added; None before the first.
    """

    def __init__(self, pool: ServerPool, redundancy: Callable[[], int]) -> None:
        self._pool = pool
        self._redundancy = redundancy
        self.plain: Draft | None = None
        self._next_plain: Draft | None = None

    def drafted(self, plain: Draft) -> Draft:
        """The draft with all that audiences want."""
        self._next_plain = plain
        return self._added_to(plain)

    def published(self) -> None:
        """The last draft is the current placement."""
        self.plain = self._next_plain

    def due(self, current: Placement) -> Draft | None:
        """What to draft, as clients reach other servers than they did; None: the placement is right."""
        if self.plain is None:
            return None
        wanted = self._added_to(self.plain)
        if wanted.servers == current.servers and np.array_equal(
            wanted.holds_LSE, current.holds_LSE
        ):
            return None
        return self.plain

    def has_more(self, current: Placement) -> bool:
        """Whether the current placement has replicas for audiences."""
        return self.plain is not None and bool(current.holds_LSE.sum() > self.plain.holds_LSE.sum())

    def _added_to(self, draft: Draft) -> Draft:
        able, audiences = self._pool.able, self._pool.reach.audiences
        room_S = self._pool.room_S(servers_of(draft, able))
        return with_audiences(draft, audiences, able, self._redundancy(), room_S)


def with_audiences(
    draft: Draft,
    audiences: Collection[AbstractSet[str]],
    able: Collection[str],
    redundancy: int,
    room_S: npt.NDArray[np.int64] | None,
) -> Draft:
    """The draft, and more replicas, so that each audience has every expert.

    Each expert is then on `redundancy` servers of each audience, on all of them where there are fewer, as far
    as there is memory: first one replica of each, then the second. What the draft has stays, but for the
    least share that a new replica takes.

    Args:
        draft: A placement without an epoch; of its servers and `able` ones.
        audiences: Servers that clients are limited to.
        able: Servers that can be given experts.
        redundancy: Servers that hold each expert.
        room_S: Replicas that `servers_of(draft, able)` have memory for; None: no limit.

    Returns:
        The draft itself where it has all that is wanted.
    """
    if not audiences:
        return draft
    servers = servers_of(draft, able)
    layers, _, experts = draft.holds_LSE.shape
    holds_LSE = np.zeros((layers, len(servers), experts), np.bool_)
    holds_LSE[:, : len(draft.servers)] = draft.holds_LSE
    able_S = np.array([s in able for s in servers], np.bool_)
    for wanted in range(1, redundancy + 1):
        # Sorted, so that a balancer that restarts decides alike.
        for audience in sorted(audiences, key=sorted):
            inside_S = np.array([s in audience for s in servers], np.bool_)
            _fill(holds_LSE, inside_S, able_S & inside_S, wanted, room_S)
    added_LSE = holds_LSE.copy()
    added_LSE[:, : len(draft.servers)] &= ~draft.holds_LSE
    if not added_LSE.any():
        return draft
    shares_LSE = np.zeros(holds_LSE.shape)
    shares_LSE[:, : len(draft.servers)] = draft.shares_LSE
    spare_LE = 1 - BACKUP_SHARE * added_LSE.sum(axis=1)
    shares_LSE = shares_LSE * spare_LE[:, None] + BACKUP_SHARE * added_LSE
    # Servers that neither have nor get anything are not of the placement.
    used = [s for s, name in enumerate(servers) if name in draft.servers or added_LSE[:, s].any()]
    names = tuple(servers[s] for s in used)
    return Draft(names, holds_LSE[:, used], shares_LSE[:, used], draft.layer_order)


def servers_of(draft: Draft, able: Collection[str]) -> tuple[str, ...]:
    """The servers of a draft, then the able ones that it does not have."""
    return (*draft.servers, *sorted({*able} - {*draft.servers}))


def _fill(
    holds_LSE: Holds,
    inside_S: Holds,
    able_S: Holds,
    wanted: int,
    room_S: npt.NDArray[np.int64] | None,
) -> None:
    """Add replicas on able servers until each expert has `wanted` of them inside, where that can be."""
    count_S = holds_LSE.sum(axis=(0, 2))
    short_LE = holds_LSE[:, inside_S].sum(axis=1) < wanted
    for layer, expert in np.argwhere(short_LE):
        free_S = able_S & ~holds_LSE[layer, :, expert]
        if room_S is not None:
            free_S &= count_S < room_S
        if free_S.any():
            server = min(np.flatnonzero(free_S), key=lambda s: (count_S[s], s))
            holds_LSE[layer, server, expert] = True
            count_S[server] += 1
