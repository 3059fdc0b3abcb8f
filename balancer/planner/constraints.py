"""Placements the planner was asked for: a proposal's stages, and the previous balancer's candidate.

No I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Sequence

from balancer.planner.candidates import Candidate, covers, gains
from balancer.planner.pool import ServerPool
from balancer.planner.steps import Steps
from eaas.types import Placement

__all__ = ["Constraints"]


class Constraints:
    """The planner's pending stages, and whether the current placement was requested.

    Args:
        pool: The servers.
        steps: Calls to the servers.

    Attributes:
        stages: Pending stages of a proposal, or of a repair in several steps.
        is_granted: Whether the current placement, or its predecessor, was proposed. It may then be uneven.
        wanted: The last candidate of the previous balancer; None: unknown.
    """

    def __init__(self, pool: ServerPool, steps: Steps) -> None:
        self._pool = pool
        self._steps = steps
        self.stages: list[Candidate] = []
        self.is_granted = False
        self.wanted: Placement | None = None

    @property
    def last_epoch(self) -> int:
        """Epoch of the previous balancer's last candidate, which new epochs must exceed; 0: unknown."""
        return self.wanted.epoch if self.wanted else 0

    @property
    def keeps_as_is(self) -> bool:
        """Whether repair leaves replicas uneven, as the placement was requested or stages are pending."""
        return self.is_granted or bool(self.stages)

    def propose(self, stages: Sequence[Candidate], current: Placement) -> str | None:
        """Accept the stages of a proposal, for `next_stage` to take; or return the reason for a refusal."""
        for server in stages[-1].servers:
            if server not in self._pool.able and gains(server, current, stages):
                return f"{server} cannot be given experts now"
        self.stages = list(stages)
        return None

    def next_stage(self, current: Placement, limited: bool) -> Candidate | None:
        """Take the next stage, once its servers can carry it out; None: not yet, or no stage is left.

        A stage waits while one of its dead servers would have to load something or would be the only holder
        of an expert. With limited memory it also waits until servers have dropped what the previous stage
        removed.
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
