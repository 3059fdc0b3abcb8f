"""Operators' edits of a placement, made in the balancer: one replica more or less, or a whole placement."""

from __future__ import annotations

import numpy as np

from balancer.planner.backups import primaries, with_least_shares
from balancer.planner.candidates import Candidate
from balancer.planner.layout import STATIC_POLICY, Settings, Situation, best_shares
from balancer.policies.repair import even_shares
from balancer.policies.types import Holds
from eaas.counted import counted
from eaas.types import Placement

__all__ = ["checked", "with_replica", "without_replica"]

_LEAST_SUM = 1e-3


def with_replica(
    settings: Settings, now: Situation, layer: int, expert: int, server: str
) -> Candidate:
    """Return the placement with one more replica, which counts as a primary.

    Raises ValueError if the server has no memory for it.
    """
    s = now.servers.index(server)
    if now.capacity_S is not None and now.holds_LSE[:, s].sum() >= now.capacity_S[s]:
        raise ValueError(f"{server} has no memory for another replica")
    holds_LSE, primary_LSE = now.holds_LSE.copy(), primaries(now.holds_LSE, now.shares_LSE)
    holds_LSE[layer, s, expert] = primary_LSE[layer, s, expert] = True
    return _candidate(settings, now, holds_LSE, primary_LSE)


def without_replica(
    settings: Settings, now: Situation, layer: int, expert: int, server: str
) -> Candidate:
    """Return the placement without a replica; others take its share.

    Raises ValueError if fewer than the redundancy remain, or if the others share one node and need not.
    """
    s = now.servers.index(server)
    left = int(now.holds_LSE[layer, :, expert].sum()) - 1
    if left < min(settings.redundancy, len(now.servers)):
        raise ValueError(
            f"expert {expert} of layer {layer} would be on {counted(left, 'server')}, "
            f"balancer.redundancy is {settings.redundancy}"
        )
    holders_S = now.holds_LSE[layer, :, expert].copy()
    holders_S[s] = False
    if left > 1 and now.nodes_S is not None:
        nodes = set(now.nodes_S[holders_S].tolist())
        if len(nodes) == 1 and now.nodes_S[s] not in nodes:
            raise ValueError(
                f"expert {expert} of layer {layer} would be on one node only, {nodes.pop()}"
            )
    holds_LSE = now.holds_LSE.copy()
    holds_LSE[layer, s, expert] = False
    shares_LSE = np.where(holds_LSE, now.shares_LSE, 0.0)
    return _candidate(settings, now, holds_LSE, primaries(holds_LSE, shares_LSE))


def _candidate(
    settings: Settings, now: Situation, holds_LSE: Holds, primary_LSE: Holds
) -> Candidate:
    if settings.policy == STATIC_POLICY or not now.load_LE.any():
        return Candidate(now.servers, holds_LSE, even_shares(holds_LSE))
    shares_LSE = best_shares(now.load_LE, primary_LSE, now.speeds_S)
    return Candidate(now.servers, holds_LSE, with_least_shares(primary_LSE, holds_LSE, shares_LSE))


def checked(wanted: Placement) -> Candidate:
    """Turn an operator's placement into a candidate. Raises ValueError if clients could not follow it."""
    holds_LSE, shares_LSE = wanted.holds_LSE, wanted.shares_LSE
    if len(set(wanted.servers)) != len(wanted.servers):
        raise ValueError("the placement names a server twice")
    missing = np.argwhere(~holds_LSE.any(axis=1))
    if len(missing):
        layer, expert = missing[0]
        raise ValueError(f"layer {layer}, expert {expert} has no server ({len(missing)} such)")
    if not (np.isfinite(shares_LSE) & ((shares_LSE > 0) == holds_LSE)).all():
        raise ValueError("shares must be above 0 for each replica")
    wrong = np.argwhere(np.abs(shares_LSE.sum(axis=1) - 1) > _LEAST_SUM)
    if len(wrong):
        layer, expert = wrong[0]
        raise ValueError(f"the shares of layer {layer}, expert {expert} do not sum to 1")
    return Candidate(wanted.servers, holds_LSE, shares_LSE)
