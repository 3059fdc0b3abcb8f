"""What somebody wants of placements beyond that every expert has servers. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence

from balancer.drafts import Draft, covers, gains
from balancer.pool import ServerPool
from balancer.steps import Steps
from eaas.types import Placement

__all__ = ["Wishes"]


class Wishes:
    """Stages that are still to come, and whether the placement in force was wished for.

    Args:
        pool: The servers.
        steps: What they were told, and have done.

    Attributes:
        stages: Of a proposal, or of a repair that takes several.
        is_granted: The current placement, or what it came from, was proposed: it needs not be even.
        wanted: The last draft of the balancer before; None: nobody knows.
    """

    def __init__(self, pool: ServerPool, steps: Steps) -> None:
        self._pool = pool
        self._steps = steps
        self.stages: list[Draft] = []
        self.is_granted = False
        self.wanted: Placement | None = None

    @property
    def last_epoch(self) -> int:
        """Of what the balancer before wanted; 0 where nobody knows."""
        return self.wanted.epoch if self.wanted else 0

    @property
    def keeps_as_is(self) -> bool:
        """Whether the placement is as it is for a reason, however uneven."""
        return self.is_granted or bool(self.stages)

    def propose(self, stages: Sequence[Draft], current: Placement) -> str | None:
        """Says what speaks against these stages; None: they come next."""
        for server in stages[-1].servers:
            if server not in self._pool.able and gains(server, current, stages):
                return f"{server} cannot be given experts now"
        self.stages = list(stages)
        return None

    def next_stage(self, current: Placement, limited: bool) -> Draft | None:
        """The next one, once all that it counts on do as they are told.

        Not while one of its servers is dead and is to load something, or is to be the only one that has an
        expert: that would leave those that have it now. And where memory is limited each has to have
        dropped what the stage before took from it.
        """
        if not self.stages:
            return None
        stage, willing = self.stages[0], self._pool.willing
        away = {*stage.servers} - willing.keys()
        if any(gains(server, current, [stage]) for server in away):
            return None
        if away and not covers(stage, willing):
            return None
        if limited and self._steps.unheard(current):
            return None
        self.is_granted = True
        return self.stages.pop(0)
