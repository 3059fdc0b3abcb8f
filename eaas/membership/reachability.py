"""Which expert servers attention clients reach, by their reports; for `eaas status` and dashboard. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from eaas.nodes import different_nodes, node_of
from eaas.replicas import Replicas
from eaas.types import Member, MemberState, Role

__all__ = ["ANSWERING", "fewest_nodes", "fewest_replicas", "unreachable"]

_USING = (MemberState.SERVING, MemberState.SUSPECT)

ANSWERING = (MemberState.SERVING, MemberState.DRAINING, MemberState.SUSPECT)
"""States of a server that answers requests; a DRAINING server keeps its experts until others have them."""


def unreachable(members: Iterable[Member]) -> dict[str, dict[str, str]]:
    """Collect why live attention clients cannot reach live servers: {server id: {client id: reason}}."""
    known = tuple(members)
    lives = {
        (m.id, m.incarnation) for m in known if m.role is Role.EXPERT_SERVER and not m.state.is_gone
    }
    found: dict[str, dict[str, str]] = {}
    for client in sorted(known, key=lambda m: m.id):
        if client.state.is_gone:
            continue
        for report in client.reach or ():
            if report.reason and (report.server_id, report.server_incarnation) in lives:
                found.setdefault(report.server_id, {})[client.id] = report.reason
    return found


def fewest_replicas(
    replicas: Replicas,
    servers: Sequence[str],
    members: Iterable[Member],
) -> npt.NDArray[np.int64]:
    """Count reachable replicas of each expert, for the client that reaches the fewest: int64 (L, E).

    Only clients that serve and reach at least one of the servers count, because a client that reaches none is
    itself cut off. A client of an earlier release reports nothing and counts as reaching all.

    Args:
        replicas: The placement's.
        servers: Ids, in their order in the placement.
        members: All members.
    """
    return _fewest(replicas.count_LE, servers, members)


def fewest_nodes(
    replicas: Replicas,
    servers: Sequence[str],
    members: Iterable[Member],
) -> npt.NDArray[np.int64]:
    """Count the nodes with reachable replicas of each expert (see `fewest_replicas`): int64 (L, E)."""
    known = tuple(members)
    names = {m.id: node_of(m) for m in known}
    nodes = [names.get(s, s) for s in servers]
    return _fewest(lambda of_S: different_nodes(replicas, nodes, of_S), servers, known)


def _fewest(
    count: Callable[[npt.NDArray[np.bool_]], npt.NDArray[np.int64]],
    servers: Sequence[str],
    members: Iterable[Member],
) -> npt.NDArray[np.int64]:
    """int64 (L, E): the least of the counts over the servers, bool (S), that each client reaches."""
    known = tuple(members)
    incarnations = {m.id: m.incarnation for m in known if m.role is Role.EXPERT_SERVER}
    answering = {m.id for m in known if m.state in ANSWERING}
    may_S = np.array([s in answering for s in servers], np.bool_)
    fewest_LE = count(may_S)
    for client in known:
        if client.reach is None or client.state not in _USING:
            continue
        reached = {
            r.server_id
            for r in client.reach
            if not r.reason and incarnations.get(r.server_id) == r.server_incarnation
        }
        reach_S = may_S & np.array([s in reached for s in servers], np.bool_)
        if reach_S.any():
            fewest_LE = np.minimum(fewest_LE, count(reach_S))
    return np.asarray(fewest_LE, np.int64)
