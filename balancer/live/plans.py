"""What the planner knows at a moment, and a plan that was made from that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from balancer.live.mind import Proposal, Settings, Situation
from balancer.planner import Planner
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.types import Member, Placement

__all__ = ["VERDICTS", "Glimpse", "NotNowError", "Planned"]

VERDICTS = {
    "nothing": pb.VERDICT_NOTHING,
    "shares": pb.VERDICT_SHARES,
    "moves": pb.VERDICT_MOVES,
}


class NotNowError(Exception):
    """The cluster is not in a state for that; says why. Later it may be."""


@dataclass(frozen=True, eq=False)
class Glimpse:
    """What the planner knows at a moment.

    Attributes:
        placement: The one that was published last.
        servers: Expert servers that live, by id.
        able: Those of them that can be given experts.
        at_rest: Whether no roll-out is going on.
        clients: Attention clients, whatever their state.
    """

    placement: Placement | None
    servers: Mapping[str, Member]
    able: frozenset[str]
    at_rest: bool
    clients: Sequence[Member] = ()

    @property
    def away(self) -> tuple[str, ...]:
        """Servers of the placement that are dead; for a time their return is waited for."""
        servers = self.placement.servers if self.placement else ()
        return tuple(s for s in servers if s not in self.servers)

    @classmethod
    def of(cls, planner: Planner) -> Glimpse:
        """To be called on the planner's thread."""
        pool = planner.pool
        able = frozenset(pool.able)
        return cls(planner.current, pool.alive, able, planner.is_at_rest, pool.clients)


@dataclass(frozen=True, eq=False)
class Planned:
    """A plan, and what it was made for.

    Attributes:
        id: For `Apply`.
        settings, situation: What was asked.
        proposal: What was answered.
        placement: That of then. The situation has those of its servers that lived.
        plan_s: Seconds that it took.
        applicable: The servers are those that there are.
    """

    id: str
    settings: Settings
    situation: Situation
    proposal: Proposal
    placement: Placement
    plan_s: float
    applicable: bool
