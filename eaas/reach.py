"""Which expert servers the attention clients reach, by what they report. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from eaas.types import Member, MemberState, Role

__all__ = ["ANSWERING", "fewest_replicas", "unreachable"]

_USING = (MemberState.SERVING, MemberState.SUSPECT)

ANSWERING = (MemberState.SERVING, MemberState.DRAINING, MemberState.SUSPECT)
"""States of a server that can be asked; one that is DRAINING keeps its experts until others have them."""


def unreachable(members: Iterable[Member]) -> dict[str, dict[str, str]]:
    """Why clients cannot reach servers: {server id: {client id: reason}}, of those that live."""
    known = tuple(members)
    lives = {
        (m.id, m.incarnation) for m in known if m.role is Role.EXPERT_SERVER and not m.state.is_gone
    }
    found: dict[str, dict[str, str]] = {}
    for client in sorted(known, key=lambda m: m.id):
        if client.state.is_gone:
            continue
        for said in client.reach or ():
            if said.reason and (said.server_id, said.server_incarnation) in lives:
                found.setdefault(said.server_id, {})[client.id] = said.reason
    return found


def fewest_replicas(
    holds_LSE: npt.NDArray[np.bool_],
    servers: Sequence[str],
    members: Iterable[Member],
) -> npt.NDArray[np.int64]:
    """Replicas of each expert that the client which reaches fewest of them can ask: int64 (L, E).

    A client counts while it serves and reaches one of these servers; one that reports nothing (of a former
    release) reaches all of them. A client that reaches none is cut off itself, and says nothing of them.

    Args:
        holds_LSE: bool (L, S, E); the placement's.
        servers: Ids; index S.
        members: All of them.
    """
    known = tuple(members)
    incarnations = {m.id: m.incarnation for m in known if m.role is Role.EXPERT_SERVER}
    answering = {m.id for m in known if m.state in ANSWERING}
    may_S = np.array([s in answering for s in servers], np.bool_)
    fewest_LE = holds_LSE[:, may_S].sum(axis=1)
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
            fewest_LE = np.minimum(fewest_LE, holds_LSE[:, reach_S].sum(axis=1))
    return np.asarray(fewest_LE, np.int64)
