"""From what servers hold and who they are to the placement that they should have. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from balancer.layout import Holds, Layout, Shares
from balancer.live.stages import shares_of, stages
from balancer.policies.moves import ordered_moves
from balancer.policies.repair import even_shares, restore
from balancer.policies.room import NoRoomError, fit, without_spares
from balancer.pool import ServerPool
from eaas.types import Member, MemberState, Placement
from eaas.words import counted

__all__ = [
    "Draft",
    "covers",
    "first",
    "gains",
    "has_orphans",
    "lacking_without",
    "recovered",
    "repaired",
    "with_orphans",
]


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


def gains(server: str, current: Placement, stages: Sequence[Draft]) -> bool:
    """Whether a server is to hold at any stage what it does not hold by the placement now."""
    held_LE: npt.NDArray[np.bool_] | bool = False
    if server in current.servers:
        held_LE = current.holds_LSE[:, current.servers.index(server)]
    return any(
        bool((stage.holds_LSE[:, stage.servers.index(server)] & ~np.asarray(held_LE)).any())
        for stage in stages
        if server in stage.servers
    )


def covers(draft: Draft, some: Mapping[str, Member]) -> bool:
    """Whether each expert is to be on one of these servers."""
    return bool(draft.holds_LSE[:, _among(draft.servers, some)].any(axis=1).all())


def first(layout: Layout, layers: int, experts: int, pool: ServerPool) -> Draft:
    """Of servers that hold nothing. Raises NoRoomError."""
    servers = tuple(pool.able)
    wished = layout.first(layers, experts, servers)
    nothing_LSE = np.zeros((layers, len(servers), experts), np.bool_)
    return Draft(servers, *_fitted(*wished, nothing_LSE, pool.room_S(servers)))


def recovered(
    held: Mapping[str, npt.NDArray[np.bool_]],
    layout: Layout,
    wanted: Placement | None,
    pool: ServerPool,
) -> list[Draft]:
    """From what each server says that it holds, and from what was wanted when somebody knew.

    Args:
        held: bool (L, E), by server.
        layout: Decides where what was wanted is not for these servers.
        wanted: The last draft of the balancer before; None: nobody knows.
        pool: Says what they have memory for.

    Raises:
        NoRoomError: Not for all experts.
    """
    servers = tuple(held)
    held_LSE = np.stack(tuple(held.values()), axis=1)
    if wanted is not None and set(wanted.servers) == set(servers):
        servers = wanted.servers
        held_LSE = np.stack([held[s] for s in servers], axis=1)
        then = Draft(servers, wanted.holds_LSE, wanted.shares_LSE)
    else:
        known_LSE = np.zeros(held_LSE.shape, np.float32)
        if wanted is not None:
            known_LSE = _columns(wanted, servers)[1]
        wished = layout.around(servers, held_LSE, known_LSE)
        then = Draft(servers, *_fitted(*wished, held_LSE, pool.room_S(servers)))
    now_LSE = np.where(held_LSE, then.shares_LSE, 0.0)
    return [*_stages_before(servers, held_LSE, now_LSE, then, pool), then]


def has_orphans(current: Placement, pool: ServerPool) -> bool:
    """Whether an expert has lost the last living replica that clients reach."""
    return not current.holds_LSE[:, _among(current.servers, pool.reached)].any(axis=1).all()


def with_orphans(current: Placement, pool: ServerPool, *, at_rest: bool) -> Draft | None:
    """Experts without a living replica are put on servers that are able; nothing else changes.

    On those that serve already, if there are any: a newcomer may take its time, or hang. None where there
    is no such expert. Where memory is limited, servers that are full first give replicas up that others
    have, too, which is a draft of its own.

    Args:
        current: The placement now.
        pool: The servers.
        at_rest: They hold that and nothing else.

    Raises:
        NoRoomError: No able server has memory for any of them.
    """
    if not has_orphans(current, pool):
        return None
    reached = pool.reached
    able = {s: m for s, m in pool.able.items() if m.state is MemberState.SERVING} or pool.able
    servers = tuple(dict.fromkeys((*current.servers, *able)))
    room_S = pool.room_S(servers)
    if room_S is not None and not at_rest:
        return None  # They hold more than that by now: it cannot be said what they have room for.
    holds_LSE, shares_LSE = _columns(current, servers)
    living_S, able_S = _among(servers, reached), _among(servers, able)
    after_LSE = restore(holds_LSE, living_S, able_S, room_S)
    if (after_LSE == holds_LSE).all():
        after_LSE = _with_less(holds_LSE, living_S, able_S)
    used = np.flatnonzero(after_LSE.any(axis=(0, 2)))
    after_LSE, shares_LSE = after_LSE[:, used], shares_LSE[:, used]
    # What is new takes as much as if all took the same.
    shares_LSE = np.where(after_LSE & (shares_LSE == 0), even_shares(after_LSE), shares_LSE)
    return Draft(tuple(servers[s] for s in used), after_LSE, shares_of(after_LSE, shares_LSE))


def _with_less(holds_LSE: Holds, living_S: Holds, able_S: Holds) -> Holds:
    """Able servers have given up as many spare replicas as there are experts without a living one."""
    wanted = int((~holds_LSE[:, living_S].any(axis=1)).sum())
    missing = wanted
    for server in np.flatnonzero(able_S):
        holds_LSE, dropped = without_spares(holds_LSE, living_S, int(server), missing)
        missing -= dropped
    if missing == wanted:
        raise NoRoomError(
            f"{counted(wanted, 'expert')} lost the last replica, and no server has memory left: "
            "raise expert_server.memory_bytes, or start another server"
        )
    return holds_LSE


def repaired(
    current: Placement, pool: ServerPool, layout: Layout, now: float, *, is_wanted: bool
) -> list[Draft]:
    """Servers that joined get a share, that of those that leave goes to others.

    The return of a server that died is waited for, until its time is over or somebody comes or leaves.
    Empty where nobody came or left, and the placement is even, or needs not be. More than one where
    servers have no memory for what they hold and what they are to hold together.

    Args:
        current: The placement now.
        pool: The servers.
        layout: Decides what it is to look like.
        now: Monotonic seconds.
        is_wanted: The placement is as it is for a reason, however uneven.

    Raises:
        NoRoomError: There is no memory for all experts without those that left.
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
        return []
    held_LSE, shares_LSE = _columns(current, servers)
    wished = layout.around(servers, held_LSE, shares_LSE)
    room_S = pool.room_S(servers)
    then = Draft(servers, *_fitted(*wished, held_LSE, room_S))
    # Those that leave serve until the last stage.
    both = (*servers, *(s for s in gone if s in pool.holders))
    return [*_stages_before(both, *_columns(current, both), then, pool), then]


def lacking_without(server_id: str, current: Placement, pool: ServerPool) -> str | None:
    """What memory would be missing without a server; None: none."""
    others = tuple(s for s in pool.able if s != server_id)
    room_S = pool.room_S(others) if others else None
    layers, _, experts = current.holds_LSE.shape
    if room_S is None or (room := int(room_S.clip(max=layers * experts).sum())) >= layers * experts:
        return None
    return (
        f"without {server_id} there is memory for {room} of {layers * experts} experts: "
        "start another server first"
    )


def _stages_before(
    servers: tuple[str, ...],
    held_LSE: Holds,
    shares_LSE: npt.NDArray[np.floating],
    then: Draft,
    pool: ServerPool,
) -> list[Draft]:
    """Drafts on the way to another one, where memory is limited.

    Args:
        servers: Those of `then`, and after them those that leave.
        held_LSE, shares_LSE: Of these, now.
        then: Where to.
    """
    room_S = pool.room_S(servers)
    if room_S is None or not held_LSE.any(axis=1).all():
        return []
    none_LSE = np.zeros_like(held_LSE[:, len(then.servers) :])
    then_LSE = np.concatenate([then.holds_LSE, none_LSE], axis=1)
    then_shares_LSE = np.concatenate([then.shares_LSE, none_LSE], axis=1)
    slots_LS = np.maximum(held_LSE.sum(axis=2), then_LSE.sum(axis=2))
    moves = ordered_moves(held_LSE, then_LSE, slots_LS)
    found = stages(held_LSE, shares_LSE, then_LSE, then_shares_LSE, moves, room_S)
    return [Draft(servers, *stage) for stage in found[:-1]]


def _fitted(
    holds_LSE: Holds, shares_LSE: Shares, held_LSE: Holds, room_S: npt.NDArray[np.int64] | None
) -> tuple[Holds, Shares]:
    """A layout, as far as there is memory. Raises NoRoomError."""
    if room_S is None or (holds_LSE.sum(axis=(0, 2)) <= room_S).all():
        return holds_LSE, shares_LSE
    fitting_LSE = fit(holds_LSE, held_LSE, room_S)
    return fitting_LSE, shares_of(fitting_LSE, shares_LSE)


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
