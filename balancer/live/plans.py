"""In the balancer: a snapshot of the planner's state, and a plan made from one.

A plan is for the placement's live servers. While the planner waits for a dead one to return, that one keeps
its replicas as backups with the least share, so that no server loads what the dead one will bring back
shortly. Its share of the load is planned once it is back.

Shape suffixes: L layers, S servers, E logical experts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from balancer.live.cost_benefit import Proposal
from balancer.live.state import LoadState
from balancer.planner.digests import Digests
from balancer.planner.layout import Settings, Situation
from balancer.planner.planner import Planner
from balancer.planner.stages import shares_of
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.types import Member, Placement

__all__ = ["VERDICTS", "NotNowError", "Planned", "PlannerSnapshot"]

VERDICTS = {
    "nothing": pb.VERDICT_NOTHING,
    "shares": pb.VERDICT_SHARES,
    "moves": pb.VERDICT_MOVES,
}


class NotNowError(Exception):
    """The cluster's current state does not allow this; the message says why. Try again later."""


@dataclass(frozen=True, eq=False)
class PlannerSnapshot:
    """The planner's state at one moment; a plan made from it is refused if the placement has changed.

    Attributes:
        placement: The last published one.
        servers: Live expert servers, by id.
        able: The servers among them that can be given experts.
        at_rest: Whether no roll-out is in progress.
        clients: Attention clients in any state.
        digests_LE: Known digests of the experts' bytes, for servers that load them; None: none is known.
    """

    placement: Placement | None
    servers: Mapping[str, Member]
    able: frozenset[str]
    at_rest: bool
    clients: Sequence[Member] = ()
    digests_LE: Digests | None = None

    @property
    def away(self) -> tuple[str, ...]:
        """Dead servers of the placement, which may still return within the planner's grace."""
        servers = self.placement.servers if self.placement else ()
        return tuple(s for s in servers if s not in self.servers)

    def situation(self, load: LoadState) -> Situation:
        """Return a plan's input for the placement's live servers. Raises NotNowError if there are none."""
        placement = self.placement
        if placement is None:
            raise NotNowError("there is no placement yet")
        servers, holds_LSE, shares_LSE = (
            placement.servers,
            placement.holds_LSE,
            placement.shares_LSE,
        )
        lives_S = np.array([server in self.servers for server in servers], np.bool_)
        if lives_S.all():
            return load.situation(servers, holds_LSE, shares_LSE)
        if not lives_S.any():
            raise NotNowError("no server of the placement lives")
        held_LSE = holds_LSE[:, lives_S]
        living = [server for server in servers if server in self.servers]
        now = load.situation(living, held_LSE, shares_of(held_LSE, shares_LSE[:, lives_S]))
        return replace(now, away_LE=holds_LSE[:, ~lives_S].sum(axis=1))

    @classmethod
    def of(cls, planner: Planner) -> PlannerSnapshot:
        """Take a snapshot of a planner for the rebalancer. Called on the planner's thread."""
        pool = planner.pool
        able = frozenset(pool.able)
        return cls(
            planner.current,
            pool.alive,
            able,
            planner.is_at_rest,
            pool.clients,
            planner.digests.known_LE,
        )


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan and its input. The rebalancer keeps the last ones, for `Apply`.

    Attributes:
        id: For `Apply`.
        settings, situation: The input.
        proposal: The result.
        placement: The placement at planning time. The situation has its live servers.
        plan_s: Planning time in seconds.
        applicable: Whether the plan is for the cluster's own servers.
    """

    id: str
    settings: Settings
    situation: Situation
    proposal: Proposal
    placement: Placement
    plan_s: float
    applicable: bool
