"""A placement one of whose servers is dead, while its return is awaited: the others are balanced without it.

It keeps what it has, and for that the least share, by which it is known as a backup: so nobody loads what
will be there again in a moment. What it is to take is planned for once it is back.

Shape suffixes: L layers, S servers, E logical experts.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from balancer.drafts import Draft
from balancer.live.backups import BACKUP_SHARE
from balancer.live.mind import Situation
from balancer.live.plans import NotNowError
from balancer.live.stages import shares_of
from balancer.live.state import LoadState
from eaas.types import Placement

__all__ = ["among_the_living", "with_the_dead"]


def among_the_living(load: LoadState, placement: Placement, away: Collection[str]) -> Situation:
    """What a layout is to be made for, without the servers that are away.

    Raises:
        NotNowError: All of them are.
    """
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


def with_the_dead(draft: Draft, placement: Placement) -> Draft:
    """A layout of some of a placement's servers, and the others as they are there."""
    away = [s for s, server in enumerate(placement.servers) if server not in draft.servers]
    if not away:
        return draft
    held_LAE = placement.holds_LSE[:, away]
    least_LAE = BACKUP_SHARE * held_LAE
    spare_LE = 1 - least_LAE.sum(axis=1)
    return Draft(
        (*draft.servers, *(placement.servers[s] for s in away)),
        np.concatenate([draft.holds_LSE, held_LAE], axis=1),
        np.concatenate([draft.shares_LSE * spare_LE[:, None], least_LAE], axis=1),
        draft.layer_order,
    )
