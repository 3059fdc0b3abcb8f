"""In the balancer: plans for a placement's live servers while the planner waits for a dead one to return.

The dead server keeps its replicas as backups with the least share, so that no server loads what the dead one
will bring back shortly. Its share of the load is planned once it is back.

Shape suffixes: L layers, S servers, E logical experts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from balancer.live.cost_benefit import Situation
from balancer.live.plans import NotNowError
from balancer.live.state import LoadState
from balancer.planner.backups import BACKUP_SHARE
from balancer.planner.candidates import Candidate
from balancer.planner.stages import shares_of
from eaas.types import Placement

__all__ = ["among_the_living", "with_the_dead"]


def among_the_living(load: LoadState, placement: Placement, away: Collection[str]) -> Situation:
    """Return a plan's input for the servers that are not away. Raises NotNowError if all of them are."""
    servers, holds_LSE, shares_LSE = placement.servers, placement.holds_LSE, placement.shares_LSE
    if not away:
        return load.situation(servers, holds_LSE, shares_LSE)
    living = [s for s, server in enumerate(servers) if server not in away]
    dead = [s for s, server in enumerate(servers) if server in away]
    if not living:
        raise NotNowError("no server of the placement lives")
    held_LSE = holds_LSE[:, living]
    now = load.situation(
        [servers[s] for s in living], held_LSE, shares_of(held_LSE, shares_LSE[:, living])
    )
    return replace(now, away_LE=holds_LSE[:, dead].sum(axis=1))


def with_the_dead(candidate: Candidate, placement: Placement) -> Candidate:
    """Add the placement's dead servers to a candidate before it is proposed, their replicas as backups."""
    away = [s for s, server in enumerate(placement.servers) if server not in candidate.servers]
    if not away:
        return candidate
    held_LAE = placement.holds_LSE[:, away]
    least_LAE = BACKUP_SHARE * held_LAE
    spare_LE = 1 - least_LAE.sum(axis=1)
    return Candidate(
        (*candidate.servers, *(placement.servers[s] for s in away)),
        np.concatenate([candidate.holds_LSE, held_LAE], axis=1),
        np.concatenate([candidate.shares_LSE * spare_LE[:, None], least_LAE], axis=1),
        candidate.layer_order,
    )
