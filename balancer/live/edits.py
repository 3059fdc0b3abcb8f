"""One replica more or less, and an operator's own placement. Pure; what is wrong is a ValueError."""

from __future__ import annotations

import numpy as np

from balancer.drafts import Draft
from balancer.live.backups import primaries, with_least_shares
from balancer.live.mind import STATIC_POLICY, Settings, Situation, best_shares
from balancer.policies.repair import even_shares
from balancer.policies.types import Holds
from eaas.types import Placement
from eaas.words import counted

__all__ = ["checked", "with_replica", "without_replica"]

_LEAST_SUM = 1e-3


def with_replica(settings: Settings, now: Situation, layer: int, expert: int, server: str) -> Draft:
    """One more. Raises ValueError where the server has no memory for it."""
    s = now.servers.index(server)
    if now.room_S is not None and now.holds_LSE[:, s].sum() >= now.room_S[s]:
        raise ValueError(f"{server} has no memory for another replica")
    holds_LSE, primary_LSE = now.holds_LSE.copy(), primaries(now.holds_LSE, now.shares_LSE)
    holds_LSE[layer, s, expert] = primary_LSE[layer, s, expert] = True
    return _draft(settings, now, holds_LSE, primary_LSE)


def without_replica(
    settings: Settings, now: Situation, layer: int, expert: int, server: str
) -> Draft:
    """One less. Raises ValueError where fewer than wanted would be left."""
    s = now.servers.index(server)
    left = int(now.holds_LSE[layer, :, expert].sum()) - 1
    if left < min(settings.redundancy, len(now.servers)):
        raise ValueError(
            f"expert {expert} of layer {layer} would be on {counted(left, 'server')}, "
            f"balancer.redundancy is {settings.redundancy}"
        )
    holds_LSE = now.holds_LSE.copy()
    holds_LSE[layer, s, expert] = False
    shares_LSE = np.where(holds_LSE, now.shares_LSE, 0.0)
    return _draft(settings, now, holds_LSE, primaries(holds_LSE, shares_LSE))


def _draft(settings: Settings, now: Situation, holds_LSE: Holds, primary_LSE: Holds) -> Draft:
    if settings.policy == STATIC_POLICY or not now.load_LE.any():
        return Draft(now.servers, holds_LSE, even_shares(holds_LSE))
    shares_LSE = best_shares(now.load_LE, primary_LSE, now.speeds_S)
    return Draft(now.servers, holds_LSE, with_least_shares(primary_LSE, holds_LSE, shares_LSE))


def checked(wanted: Placement, layers: int, experts: int) -> Draft:
    """An operator's placement. Raises ValueError where clients could not follow it."""
    holds_LSE, shares_LSE = wanted.holds_LSE, wanted.shares_LSE
    if (holds_LSE.shape[0], holds_LSE.shape[2]) != (layers, experts):
        raise ValueError(
            f"the placement has {holds_LSE.shape[0]} layers of {holds_LSE.shape[2]} experts, "
            f"the model has {layers} of {experts}"
        )
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
    return Draft(wanted.servers, holds_LSE, shares_LSE)
