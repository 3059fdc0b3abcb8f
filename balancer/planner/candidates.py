"""Makes the planner's candidate placements (in the balancer) from what servers hold. Pure functions."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

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

    def with_backups(self, servers: tuple[str, ...], added_LSE: Holds) -> Candidate:
        """Return this candidate with further replicas, which take the least share.

        Args:
            servers: The servers of this candidate, then others; index S.
            added_LSE: bool; the further replicas.
        """
        pad = ((0, 0), (0, len(servers) - len(self.servers)), (0, 0))
        rest_L1E = 1 - BACKUP_SHARE * added_LSE.sum(axis=1, keepdims=True)
        return Candidate(
            servers,
            np.pad(self.holds_LSE, pad) | added_LSE,
            np.pad(self.shares_LSE, pad) * rest_L1E + BACKUP_SHARE * added_LSE,
            self.layer_order,
        )


def gains(server: str, current: Placement, stages: Sequence[Candidate]) -> bool:
    """Whether a server would have to load an expert for any of these stages, beyond the current placement."""
    held_LE: npt.NDArray[np.bool_] | bool = False
    if server in current.servers:
        held_LE = current.holds_LSE[:, current.servers.index(server)]
    return any(
        bool((stage.holds_LSE[:, stage.servers.index(server)] & ~np.asarray(held_LE)).any())
        for stage in stages
        if server in stage.servers
    )


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
        servers = wanted.servers
        held_LSE = np.stack([held[s] for s in servers], axis=1)
        then = Candidate(servers, wanted.holds_LSE, wanted.shares_LSE)
    else:
        known_LSE = np.zeros(held_LSE.shape, np.float32)
        if wanted is not None:
            known_LSE = _columns(wanted, servers)[1]
        wished = layout.around(servers, held_LSE, known_LSE)
        then = Candidate(servers, *_fitted(layout, servers, *wished, held_LSE, pool))
    now_LSE = np.where(held_LSE, then.shares_LSE, 0.0)
    return [*_stages_before(servers, held_LSE, now_LSE, then, pool), then]


def has_orphans(current: Placement, pool: ServerPool) -> bool:
    """Whether an expert has lost its last living replica that clients reach. Other changes then wait."""
    return not current.holds_LSE[:, _among(current.servers, pool.reached)].any(axis=1).all()


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
    reached = pool.reached
    able = {s: m for s, m in pool.able.items() if m.state is MemberState.SERVING} or pool.able
    servers = tuple(dict.fromkeys((*current.servers, *able)))
    capacity_S = pool.capacity_S(servers)
    if capacity_S is not None and not at_rest:
        return None  # The servers hold more than the placement, so their free memory is unknown.
    holds_LSE, shares_LSE = _columns(current, servers)
    living_S, able_S = _among(servers, reached), _among(servers, able)
    after_LSE = restore(holds_LSE, living_S, able_S, capacity_S)
    if (after_LSE == holds_LSE).all():
        after_LSE = _with_less(holds_LSE, living_S, able_S)
    used = np.flatnonzero(after_LSE.any(axis=(0, 2)))
    after_LSE, shares_LSE = after_LSE[:, used], shares_LSE[:, used]
    # A new replica takes an even share.
    shares_LSE = np.where(after_LSE & (shares_LSE == 0), even_shares(after_LSE), shares_LSE)
    return Candidate(tuple(servers[s] for s in used), after_LSE, shares_of(after_LSE, shares_LSE))


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
    pad = ((0, 0), (0, len(servers) - len(candidate.servers)), (0, 0))
    before_LSE = np.pad(candidate.holds_LSE, pad)
    holds_LSE, able_S = before_LSE, _among(servers, able)
    for replicas in range(1, redundancy + 1):
        # Sorted, so that a restarted balancer decides the same.
        for partition in sorted(partitions, key=sorted):
            inside_S = _among(servers, partition)
            holds_LSE = restore(holds_LSE, inside_S, able_S & inside_S, capacity_S, replicas)
    added_LSE = holds_LSE & ~before_LSE
    if not added_LSE.any():
        return candidate
    # Servers that hold nothing are not part of the placement.
    used = [
        s for s, name in enumerate(servers) if name in candidate.servers or added_LSE[:, s].any()
    ]
    return candidate.with_backups(tuple(servers[s] for s in used), added_LSE[:, used])


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
    shares_nodes: bool = False,
) -> list[Candidate]:
    """Make candidates that give joined servers a share, and the shares of leaving or dead servers to others.

    A dead server keeps its share until its grace is over or another server joins or leaves.

    Args:
        current: The current placement.
        pool: The servers.
        layout: Lays out the new placement.
        now: Monotonic seconds.
        is_wanted: The placement is intended, even if uneven.
        shares_nodes: Replicas share nodes that need not.

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
    is_right = bool(awaited) or is_wanted or not layout.levels or (is_even and not shares_nodes)
    if is_right and len(servers) == len(remaining) and gone == awaited:
        return []
    held_LSE, shares_LSE = _columns(current, servers)
    wished = layout.around(servers, held_LSE, shares_LSE)
    then = Candidate(servers, *_fitted(layout, servers, *wished, held_LSE, pool))
    # Leaving servers stay in the placement until the last stage.
    both = (*servers, *(s for s in gone if s in pool.holders))
    return [*_stages_before(both, *_columns(current, both), then, pool), then]


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


def _stages_before(
    servers: tuple[str, ...],
    held_LSE: Holds,
    shares_LSE: npt.NDArray[np.floating],
    then: Candidate,
    pool: ServerPool,
) -> list[Candidate]:
    """Make the intermediate candidates before a target, if memory is limited.

    Args:
        servers: The servers of `then`, followed by those that leave.
        held_LSE, shares_LSE: Their current layout.
        then: The target.
    """
    capacity_S = pool.capacity_S(servers)
    if capacity_S is None or not held_LSE.any(axis=1).all():
        return []
    none_LSE = np.zeros_like(held_LSE[:, len(then.servers) :])
    then_LSE = np.concatenate([then.holds_LSE, none_LSE], axis=1)
    then_shares_LSE = np.concatenate([then.shares_LSE, none_LSE], axis=1)
    slots_LS = np.maximum(held_LSE.sum(axis=2), then_LSE.sum(axis=2))
    moves = ordered_moves(held_LSE, then_LSE, slots_LS)
    found = stages(held_LSE, shares_LSE, then_LSE, then_shares_LSE, moves, capacity_S)
    return [Candidate(servers, *stage) for stage in found[:-1]]


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
    return layout.apart(servers, fitting_LSE, shares_of(fitting_LSE, shares_LSE), held_LSE)


def _among(servers: tuple[str, ...], some: Container[str]) -> npt.NDArray[np.bool_]:
    """bool (S): whether each server is among `some`."""
    return np.array([s in some for s in servers], dtype=np.bool_)


def _columns(
    placement: Placement, servers: tuple[str, ...]
) -> tuple[Holds, npt.NDArray[np.float32]]:
    """Select the placement's holds and shares for these servers: bool and float32 (L, S, E)."""
    layers, _, experts = placement.holds_LSE.shape
    holds_LSE = np.zeros((layers, len(servers), experts), np.bool_)
    shares_LSE = np.zeros(holds_LSE.shape, np.float32)
    for s, server in enumerate(servers):
        if server in placement.servers:
            place = placement.servers.index(server)
            holds_LSE[:, s] = placement.holds_LSE[:, place]
            shares_LSE[:, s] = placement.shares_LSE[:, place]
    return holds_LSE, shares_LSE
