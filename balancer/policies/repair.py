"""The planner's even layouts after servers joined or left, with the fewest loads of experts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from balancer.policies.anti_affinity import apply_anti_affinity

__all__ = ["even_shares", "repair", "restore"]

Holds = npt.NDArray[np.bool_]


def repair(holds_LSE: Holds, redundancy: int) -> Holds:
    """Give each expert its replicas again, levelled over the servers, with the fewest loads.

    In each layer the servers' replica counts then differ by at most 1, and the totals over the layers are
    also levelled. The servers that hold one more are chosen for few loads; for these counts no layout takes
    fewer. A level placement stays as it is.

    Args:
        holds_LSE: bool (L, S, E) of the future servers: new ones hold nothing, leaving ones are left out.
        redundancy: Servers that hold each expert (R); all of them if there are fewer.

    Returns:
        holds_LSE: bool (L, S, E); every expert min(R, S) times.

    Time O(L * E * S * (R + S)), memory O(L * S * E).
    """
    num_layers, servers, num_experts = holds_LSE.shape
    replicas = min(redundancy, servers)
    next_LSE = holds_LSE.copy()
    if _is_level(holds_LSE, replicas):
        return next_LSE
    total_S = np.zeros(servers, dtype=np.int64)
    pairs_SS = np.zeros((servers, servers), dtype=np.int64)
    for layer in range(num_layers):
        now_SE, had_SE = next_LSE[layer], holds_LSE[layer]
        target_S = _targets(had_SE.sum(axis=1), num_experts * replicas, total_S)
        _drop_surplus(now_SE, replicas, target_S)
        _add_missing(now_SE, replicas, target_S, pairs_SS)
        _level(now_SE, had_SE, target_S)
        apply_anti_affinity(
            next_LSE[layer : layer + 1], None, None, current_LSE=had_SE[None], save=True
        )
        total_S += target_S
        pairs_SS += _shared(now_SE)
    return next_LSE


def restore(
    holds_LSE: Holds,
    alive_S: Holds,
    able_S: Holds,
    capacity_S: npt.NDArray[np.int64] | None = None,
    replicas: int = 1,
) -> Holds:
    """Add a replica, on an able server, of each expert that too few live servers hold; nothing else changes.

    Args:
        holds_LSE: bool (L, S, E).
        alive_S: bool (S); live servers.
        able_S: bool (S); servers that may be given experts.
        capacity_S: Replicas that servers have memory for; once it is used up, nothing is added.
        replicas: Live servers that should hold each expert; 1: only orphans get a replica.

    Returns:
        holds_LSE: bool (L, S, E).
    """
    next_LSE = holds_LSE.copy()
    count_S = holds_LSE.sum(axis=(0, 2))
    for layer, expert in np.argwhere(holds_LSE[:, alive_S].sum(axis=1) < replicas):
        free_S = able_S & ~holds_LSE[layer, :, expert]
        if capacity_S is not None:
            free_S &= count_S < capacity_S
        if free_S.any():
            server = min(np.flatnonzero(free_S), key=lambda s: (count_S[s], s))
            next_LSE[layer, server, expert] = True
            count_S[server] += 1
    return next_LSE


def even_shares(holds_LSE: Holds) -> npt.NDArray[np.float32]:
    """float32 (L, S, E): 1/n for each of an expert's n replicas, else 0; for repairs and operators' edits."""
    replicas_LE = holds_LSE.sum(axis=1, keepdims=True)
    shares_LSE: npt.NDArray[np.float32] = (holds_LSE / np.maximum(replicas_LE, 1)).astype(
        np.float32
    )
    return shares_LSE


def _shared(holds_SE: Holds) -> npt.NDArray[np.int64]:
    """int64 (S, S): experts that two servers share. In float32, whose products are fast and exact here."""
    as_float_SE = holds_SE.astype(np.float32)
    return (as_float_SE @ as_float_SE.T).astype(np.int64)


def _is_level(holds_LSE: Holds, replicas: int) -> bool:
    """Whether the placement is already as even as `spread` would make it: `repair` then changes nothing."""
    count_LS = holds_LSE.sum(axis=2)
    return bool(
        (holds_LSE.sum(axis=1) == replicas).all()
        and (np.ptp(count_LS, axis=1) <= 1).all()
        and np.ptp(count_LS.sum(axis=0)) <= 2
    )


def _targets(
    count_S: npt.NDArray[np.int64], replicas: int, total_S: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """int64 (S): target number of replicas of each server in a layer: the mean rounded down, or one more.

    Servers that are not ahead over the previous layers get one more first, then those that already hold more
    than the mean rounded down (the others would have to load one), then those with the fewest.
    """
    low, extra = divmod(replicas, len(count_S))
    ahead_S = total_S > total_S.min() + 1
    target_S = np.full(len(count_S), low, dtype=np.int64)
    target_S[np.lexsort((total_S, count_S <= low, ahead_S))[:extra]] += 1
    return target_S


def _drop_surplus(now_SE: Holds, replicas: int, target_S: npt.NDArray[np.int64]) -> None:
    """Drop experts' replicas beyond `replicas` from the servers furthest above their target, in place."""
    for expert in np.flatnonzero(now_SE.sum(axis=0) > replicas):
        while now_SE[:, expert].sum() > replicas:
            above_S = np.where(now_SE[:, expert], now_SE.sum(axis=1) - target_S, np.iinfo(int).min)
            now_SE[int(above_S.argmax()), expert] = False


def _add_missing(
    now_SE: Holds,
    replicas: int,
    target_S: npt.NDArray[np.int64],
    pairs_SS: npt.NDArray[np.int64],
) -> None:
    """Add missing replicas on the servers that are furthest below their target, in place.

    Experts with the fewest replicas come first. Ties go to the server that shares the fewest experts with
    the expert's other servers, so that a lost server's load falls on all.
    """
    pairs_SS = pairs_SS + _shared(now_SE)
    count_S, held_E = now_SE.sum(axis=1), now_SE.sum(axis=0)
    for expert in np.argsort(held_E, kind="stable"):
        for _ in range(replicas - held_E[expert]):
            taken_S = now_SE[:, expert].copy()
            shared_S = pairs_SS[taken_S].sum(axis=0)
            server = int(np.lexsort((shared_S, count_S - target_S, taken_S))[0])
            now_SE[server, expert] = True
            pairs_SS[taken_S, server] += 1
            pairs_SS[server, taken_S] += 1
            count_S[server] += 1


def _level(now_SE: Holds, had_SE: Holds, target_S: npt.NDArray[np.int64]) -> None:
    """Move replicas from servers above their target to servers below it, in place.

    There is always a replica to move: a server above its target holds more experts than one below, so it
    holds one that the other does not. New replicas are moved first, because this costs no load.
    """
    while True:
        above_S = now_SE.sum(axis=1) - target_S
        source, sink = int(above_S.argmax()), int(above_S.argmin())
        if above_S[source] <= 0:
            return
        movable_E = now_SE[source] & ~now_SE[sink]
        cost_E = had_SE[source].astype(np.int64) - had_SE[sink]
        candidates = np.flatnonzero(movable_E)
        expert = int(candidates[cost_E[candidates].argmin()])
        now_SE[source, expert] = False
        now_SE[sink, expert] = True
