"""Extra replicas for clients that do not reach all servers (see `reach`), for the planner. Pure functions."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Set as AbstractSet

import numpy as np
import numpy.typing as npt

from balancer.planner.backups import BACKUP_SHARE
from balancer.planner.candidates import Candidate

__all__ = ["servers_of", "with_audiences"]

Holds = npt.NDArray[np.bool_]


def with_audiences(
    candidate: Candidate,
    audiences: Collection[AbstractSet[str]],
    able: Collection[str],
    redundancy: int,
    capacity_S: npt.NDArray[np.int64] | None,
) -> Candidate:
    """Add replicas to a candidate so that each audience has every expert.

    Each expert is then on `redundancy` servers of each audience (on all of them if there are fewer), within
    memory: first one replica of each expert, then the second. The candidate's own replicas stay; a new one
    takes the least share.

    Args:
        candidate: A placement without an epoch.
        audiences: Sets of servers that clients are limited to.
        able: Servers that can be given experts.
        redundancy: Servers that hold each expert.
        capacity_S: Replicas that `servers_of(candidate, able)` have memory for; None: no limit.

    Returns:
        The extended candidate, or the same one if nothing is missing.
    """
    if not audiences:
        return candidate
    servers = servers_of(candidate, able)
    layers, _, experts = candidate.holds_LSE.shape
    holds_LSE = np.zeros((layers, len(servers), experts), np.bool_)
    holds_LSE[:, : len(candidate.servers)] = candidate.holds_LSE
    able_S = np.array([s in able for s in servers], np.bool_)
    for wanted in range(1, redundancy + 1):
        # Sorted, so that a restarted balancer decides the same.
        for audience in sorted(audiences, key=sorted):
            inside_S = np.array([s in audience for s in servers], np.bool_)
            _fill(holds_LSE, inside_S, able_S & inside_S, wanted, capacity_S)
    added_LSE = holds_LSE.copy()
    added_LSE[:, : len(candidate.servers)] &= ~candidate.holds_LSE
    if not added_LSE.any():
        return candidate
    shares_LSE = np.zeros(holds_LSE.shape)
    shares_LSE[:, : len(candidate.servers)] = candidate.shares_LSE
    spare_LE = 1 - BACKUP_SHARE * added_LSE.sum(axis=1)
    shares_LSE = shares_LSE * spare_LE[:, None] + BACKUP_SHARE * added_LSE
    # Servers that hold nothing are not part of the placement.
    used = [
        s for s, name in enumerate(servers) if name in candidate.servers or added_LSE[:, s].any()
    ]
    names = tuple(servers[s] for s in used)
    return Candidate(names, holds_LSE[:, used], shares_LSE[:, used], candidate.layer_order)


def servers_of(candidate: Candidate, able: Collection[str]) -> tuple[str, ...]:
    """List the servers of a candidate, then the able ones that it does not have."""
    return (*candidate.servers, *sorted({*able} - {*candidate.servers}))


def _fill(
    holds_LSE: Holds,
    inside_S: Holds,
    able_S: Holds,
    wanted: int,
    capacity_S: npt.NDArray[np.int64] | None,
) -> None:
    """Add replicas on able servers until each expert has `wanted` of them in the audience, if possible."""
    count_S = holds_LSE.sum(axis=(0, 2))
    short_LE = holds_LSE[:, inside_S].sum(axis=1) < wanted
    for layer, expert in np.argwhere(short_LE):
        free_S = able_S & ~holds_LSE[layer, :, expert]
        if capacity_S is not None:
            free_S &= count_S < capacity_S
        if free_S.any():
            server = min(np.flatnonzero(free_S), key=lambda s: (count_S[s], s))
            holds_LSE[layer, server, expert] = True
            count_S[server] += 1
