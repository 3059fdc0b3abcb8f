"""In the balancer: a snapshot of the planner's state, and a plan made from one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from balancer.live.cost_benefit import Proposal, Settings, Situation
from balancer.planner.digests import Digests
from balancer.planner.planner import Planner
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
