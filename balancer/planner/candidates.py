"""Makes the planner's candidate placements (in the balancer) from what servers hold. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from balancer.planner.backups import BACKUP_SHARE
from balancer.planner.layout import Layout, Shares
from balancer.planner.pool import ServerPool
from balancer.planner.stages import shares_of, stages
from balancer.policies.capacity import NoCapacityError, fit, without_spares
from balancer.policies.moves import ordered_moves
from balancer.policies.repair import even_shares, restore
from balancer.policies.types import Holds
from eaas.counted import counted
from eaas.types import MemberState, Placement

__all__ = [
    "Candidate",
    "covers",
    "first",
    "gains",
    "has_orphans",
    "lacking_without",
    "recovered",
    "repaired",
    "servers_of",
    "with_orphans",
    "with_the_dead",
    "within_partitions",
]


@dataclass(frozen=True, eq=False)
class Candidate:
    """A placement that the planner may roll out; it has no epoch yet.

    Attributes:
        servers: Index S.
        holds_LSE: bool; which server holds which experts.
        shares_LSE: float; above 0 if held; they sum to 1 over S.
        layer_order: Layers to load first, in this order; the others follow.
    """

    servers: tuple[str, ...]
    holds_LSE: Holds
    shares_LSE: Shares
    layer_order: tuple[int, ...] = ()

    @classmethod
    def of(cls, placement: Placement) -> Candidate:
        """Return a placement's layout."""
        return cls(placement.servers, placement.holds_LSE, placement.shares_LSE)

    @property
    def holders(self) -> list[str]:
        """The servers that hold an expert."""
        replicas_S = self.holds_LSE.sum(axis=(0, 2)).tolist()
        return [server for server, count in zip(self.servers, replicas_S, strict=True) if count]

    def over(self, servers: Sequence[str]) -> Candidate:
        """Return the layout of these servers, in this order; those that it does not have hold nothing."""
        known = {server: s for s, server in enumerate(self.servers)}
        to = [s for s, server in enumerate(servers) if server in known]
        found = [known[servers[s]] for s in to]
        layers, _, experts = self.holds_LSE.shape
        holds_LSE = np.zeros((layers, len(servers), experts), np.bool_)
        shares_LSE = np.zeros(holds_LSE.shape, self.shares_LSE.dtype)
        holds_LSE[:, to], shares_LSE[:, to] = self.holds_LSE[:, found], self.shares_LSE[:, found]
        return Candidate(tuple(servers), holds_LSE, shares_LSE, self.layer_order)

    def with_backups(self, servers: tuple[str, ...], added_LSE: Holds) -> Candidate:
        """Return this layout over other servers with further replicas, which take the least share.

        Args:
            servers: All servers of this candidate, and others; index S.
            added_LSE: bool; the further replicas.
        """
        wide = self.over(servers)
        rest_L1E = 1 - BACKUP_SHARE * added_LSE.sum(axis=1, keepdims=True)
        shares_LSE = wide.shares_LSE * rest_L1E + BACKUP_SHARE * added_LSE
        return replace(wide, holds_LSE=wide.holds_LSE | added_LSE, shares_LSE=shares_LSE)


def with_the_dead(candidate: Candidate, placement: Placement) -> Candidate:
    """Add the placement's dead servers to a candidate before it is proposed, their replicas as backups."""
    away = tuple(s for s in placement.servers if s not in candidate.servers)
    servers = (*candidate.servers, *away)
    return candidate.with_backups(
        servers, Candidate.of(placement).over(away).over(servers).holds_LSE
    )


def gains(server: str, current: Placement, stages: Sequence[Candidate]) -> bool:
    """Whether a server would have to load an expert for any of these stages, beyond the current placement."""
    held_LSE = Candidate.of(current).over((server,)).holds_LSE
    return any(bool((stage.over((server,)).holds_LSE & ~held_LSE).any()) for stage in stages)


def covers(candidate: Candidate, some: Container[str]) -> bool:
    """Whether each expert of a candidate is on at least one of these servers."""
    return bool(candidate.holds_LSE[:, _among(candidate.servers, some)].any(axis=1).all())


def first(layout: Layout, layers: int, experts: int, pool: ServerPool) -> Candidate:
    """Make a new cluster's first candidate, for servers that hold nothing.

    Raises NoCapacityError if they lack memory for one replica of every expert.
    """
    servers = tuple(pool.able)
    wished = layout.first(layers, experts, servers)
    nothing_LSE = np.zeros((layers, len(servers), experts), np.bool_)
    return Candidate(servers, *_fitted(layout, servers, *wished, nothing_LSE, pool))


def recovered(
    held: Mapping[str, npt.NDArray[np.bool_]],
    layout: Layout,
    wanted: Placement | None,
    pool: ServerPool,
) -> list[Candidate]:
    """Make the first candidates of a balancer that starts in a running cluster (recovery).

    They start from what the servers report to hold, and from the previous balancer's candidate.

    Args:
        held: bool (L, E), by server; experts that it reports to hold.
        layout: Used if `wanted` is unknown or for other servers.
        wanted: The last candidate of the previous balancer; None: unknown.
        pool: The servers, with their memory.

    Raises:
        NoCapacityError: There is not enough memory for all experts.
    """
    servers = tuple(held)
    held_LSE = np.stack(tuple(held.values()), axis=1)
    if wanted is not None and set(wanted.servers) == set(servers):
        then = Candidate.of(wanted).over(servers)
    else:
        known_LSE = np.zeros(held_LSE.shape, np.float32)
        if wanted is not None:
            known_LSE = Candidate.of(wanted).over(servers).shares_LSE
        wished = layout.around(servers, held_LSE, known_LSE)
        then = Candidate(servers, *_fitted(layout, servers, *wished, held_LSE, pool))
    now = Candidate(servers, held_LSE, np.where(held_LSE, then.shares_LSE, 0.0))
    return [*_stages_before(now, then, pool), then]


def has_orphans(current: Placement, pool: ServerPool) -> bool:
    """Whether an expert has lost its last living replica that clients reach. Other changes then wait."""
    return not covers(Candidate.of(current), pool.reached)


def with_orphans(current: Placement, pool: ServerPool, *, at_rest: bool) -> Candidate | None:
    """Make a candidate that puts experts without a living replica on able servers; nothing else changes.

    Servers that already serve are preferred, because a newcomer may be slow, or hang. If memory is limited,
    full servers first give up replicas that others have, in a separate candidate.

    Args:
        current: The current placement.
        pool: The servers.
        at_rest: Whether the servers hold the current placement and nothing else.

    Returns:
        The candidate; None: no expert is without a replica.

    Raises:
        NoCapacityError: No able server has memory for any of them.
    """
    if not has_orphans(current, pool):
        return None
    able = {s: m for s, m in pool.able.items() if m.state is MemberState.SERVING} or pool.able
    servers = tuple(dict.fromkeys((*current.servers, *able)))
    capacity_S = pool.capacity_S(servers)
    if capacity_S is not None and not at_rest:
        return None  # The servers hold more than the placement, so their free memory is unknown.
    now = Candidate.of(current).over(servers)
    living_S, able_S = _among(servers, pool.reached), _among(servers, able)
    after_LSE = restore(now.holds_LSE, living_S, able_S, capacity_S)
    if (after_LSE == now.holds_LSE).all():
        after_LSE = _with_less(after_LSE, living_S, able_S)
    # A new replica takes an even share.
    is_new_LSE = after_LSE & (now.shares_LSE == 0)
    shares_LSE = shares_of(after_LSE, np.where(is_new_LSE, even_shares(after_LSE), now.shares_LSE))
    found = Candidate(servers, after_LSE, shares_LSE)
    return found.over(found.holders)


def _with_less(holds_LSE: Holds, living_S: Holds, able_S: Holds) -> Holds:
    """Drop spare replicas from able servers, one for each expert without a living replica."""
    wanted = int((~holds_LSE[:, living_S].any(axis=1)).sum())
    missing = wanted
    for server in np.flatnonzero(able_S):
        holds_LSE, dropped = without_spares(holds_LSE, living_S, int(server), missing)
        missing -= dropped
    if missing == wanted:
        raise NoCapacityError(
            f"{counted(wanted, 'expert')} lost the last replica, and no server has memory left: "
            "raise expert_server.memory_bytes, or start another server"
        )
    return holds_LSE


def within_partitions(
    candidate: Candidate,
    partitions: Collection[AbstractSet[str]],
    able: Collection[str],
    redundancy: int,
    capacity_S: npt.NDArray[np.int64] | None,
) -> Candidate:
    """Add replicas to a candidate so that clients that reach only part of the servers have every expert.

    Each expert is then on `redundancy` servers of each partition (on all of them if there are fewer), within
    memory: first one replica of each expert, then the second. The candidate's own replicas stay; a new one
    takes the least share.

    Args:
        candidate: A placement without an epoch.
        partitions: Sets of servers that clients are limited to (see `reach`).
        able: Servers that can be given experts.
        redundancy: Servers that hold each expert.
        capacity_S: Replicas that `servers_of(candidate, able)` have memory for; None: no limit.

    Returns:
        The extended candidate, or the same one if nothing is missing.
    """
    if not partitions:
        return candidate
    servers = servers_of(candidate, able)
    before_LSE = candidate.over(servers).holds_LSE
    holds_LSE, able_S = before_LSE, _among(servers, able)
    for replicas in range(1, redundancy + 1):
        # Sorted, so that a restarted balancer decides the same.
        for partition in sorted(partitions, key=sorted):
            inside_S = _among(servers, partition)
            holds_LSE = restore(holds_LSE, inside_S, able_S & inside_S, capacity_S, replicas)
    added_LSE = holds_LSE & ~before_LSE
    if not added_LSE.any():
        return candidate
    wide = candidate.with_backups(servers, added_LSE)
    # Servers that hold nothing are not part of the placement.
    used = {*candidate.servers, *wide.holders}
    return wide.over([server for server in servers if server in used])


def servers_of(candidate: Candidate, able: Collection[str]) -> tuple[str, ...]:
    """List the servers of a candidate, then the able ones that it does not have."""
    return (*candidate.servers, *sorted({*able} - {*candidate.servers}))


def repaired(
    current: Placement,
    pool: ServerPool,
    layout: Layout,
    now: float,
    *,
    is_wanted: bool,
    lacks_anti_affinity: bool = False,
) -> list[Candidate]:
    """Make candidates that give joined servers a share, and the shares of leaving or dead servers to others.

    A dead server keeps its share until its grace is over or another server joins or leaves.

    Args:
        current: The current placement.
        pool: The servers.
        layout: Lays out the new placement.
        now: Monotonic seconds.
        is_wanted: The placement is intended, even if uneven.
        lacks_anti_affinity: See `Layout.lacks_anti_affinity`.

    Returns:
        Empty if no server joined or left and the placement is right or intended. Several candidates if
        servers have no memory for the old and the new placement together.

    Raises:
        NoCapacityError: There is not enough memory for all experts without the servers that left.
    """
    staying = pool.staying
    remaining = [s for s in current.servers if s in staying]
    gone = [s for s in current.servers if s not in staying]
    awaited = [s for s in gone if pool.is_awaited(s, now)]
    servers = tuple(sorted({*remaining, *pool.able}))
    replicas = min(layout.redundancy, len(current.servers))
    is_even = bool((current.holds_LSE.sum(axis=1) == replicas).all())
    is_right = (
        bool(awaited) or is_wanted or not layout.levels or (is_even and not lacks_anti_affinity)
    )
    if is_right and len(servers) == len(remaining) and gone == awaited:
        return []
    held = Candidate.of(current).over(servers)
    wished = layout.around(servers, held.holds_LSE, held.shares_LSE)
    then = Candidate(servers, *_fitted(layout, servers, *wished, held.holds_LSE, pool))
    # Leaving servers stay in the placement until the last stage.
    both = (*servers, *(s for s in gone if s in pool.holders))
    return [*_stages_before(Candidate.of(current).over(both), then, pool), then]


def lacking_without(server_id: str, current: Placement, pool: ServerPool) -> str | None:
    """Describe how much memory would be missing without a server, which then must not drain; None: none."""
    others = tuple(s for s in pool.able if s != server_id)
    capacity_S = pool.capacity_S(others) if others else None
    layers, _, experts = current.holds_LSE.shape
    wanted = layers * experts
    if capacity_S is None or (capacity := int(capacity_S.clip(max=wanted).sum())) >= wanted:
        return None
    return (
        f"without {server_id} there is memory for {capacity} of {wanted} experts: "
        "start another server first"
    )


def _stages_before(now: Candidate, then: Candidate, pool: ServerPool) -> list[Candidate]:
    """Make the intermediate candidates before a target, if memory is limited.

    `now` also has the servers that leave.
    """
    capacity_S = pool.capacity_S(now.servers)
    if capacity_S is None or not now.holds_LSE.any(axis=1).all():
        return []
    then = then.over(now.servers)
    slots_LS = np.maximum(now.holds_LSE.sum(axis=2), then.holds_LSE.sum(axis=2))
    moves = ordered_moves(now.holds_LSE, then.holds_LSE, slots_LS)
    layouts = now.holds_LSE, now.shares_LSE, then.holds_LSE, then.shares_LSE
    return [Candidate(now.servers, *stage) for stage in stages(*layouts, moves, capacity_S)[:-1]]


def _fitted(
    layout: Layout,
    servers: tuple[str, ...],
    holds_LSE: Holds,
    shares_LSE: Shares,
    held_LSE: Holds,
    pool: ServerPool,
) -> tuple[Holds, Shares]:
    """Fit a layout into the servers' memory with the fewest changes, replicas on different nodes.

    Raises NoCapacityError if that is impossible.
    """
    capacity_S = pool.capacity_S(servers)
    if capacity_S is None or (holds_LSE.sum(axis=(0, 2)) <= capacity_S).all():
        return holds_LSE, shares_LSE
    fitting_LSE = fit(holds_LSE, held_LSE, capacity_S, pool.expert_bytes)
    return layout.with_anti_affinity(
        servers, fitting_LSE, shares_of(fitting_LSE, shares_LSE), held_LSE
    )


def _among(servers: tuple[str, ...], some: Container[str]) -> npt.NDArray[np.bool_]:
    """bool (S): whether each server is among `some`."""
    return np.array([s in some for s in servers], dtype=np.bool_)
