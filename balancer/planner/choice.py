"""Chooses the planner's next candidate: a first or recovered placement, for orphans, a repair, a proposal.

No I/O, no clock. `candidates` makes the placements; this module decides which of them is due.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from balancer.planner.actions import Action, Complain, Inspect, Process
from balancer.planner.calls import Calls
from balancer.planner.candidates import (
    Candidate,
    covers,
    first,
    gains,
    recovered,
    repaired,
    servers_of,
    with_orphans,
    within_partitions,
)
from balancer.planner.digests import ExpertDigests
from balancer.planner.layout import Layout
from balancer.planner.pool import ServerPool
from balancer.policies.capacity import NoCapacityError
from eaas.types import Placement

__all__ = ["Choice", "Chosen"]


@dataclass(frozen=True, eq=False)
class Chosen:
    """What to do next.

    Attributes:
        candidate: The placement to begin, without replicas for partitions; None: none is due.
        is_urgent: Its loads must not be given up for orphans.
        actions: Actions due.
    """

    candidate: Candidate | None = None
    is_urgent: bool = False
    actions: tuple[Action, ...] = ()


class Choice:
    """Chooses candidates by the servers and by what was asked for.

    Args:
        expected_servers: Expert servers to wait for before the first placement.
        layout: Lays out placements.
        pool, calls, digests: The planner's.

    Attributes:
        plain: The current placement without the replicas for partitions; None before the first.
        stages: Pending stages of a proposal, or of a repair in several steps.
        is_proposed: Whether the last candidate was proposed.
        is_granted: Whether the current placement, or its predecessor, was proposed. It may then be uneven.
        wanted: The last candidate of the previous balancer; None: unknown.
        recovering: Whether the cluster runs with a previous balancer's placement, or did at the start.
        holdings: What servers answered to `Inspect`: experts that they hold, bool (L, E).
    """

    def __init__(
        self,
        expected_servers: int,
        layout: Layout,
        pool: ServerPool,
        calls: Calls,
        digests: ExpertDigests,
    ) -> None:
        self._expected = expected_servers
        self._layout = layout
        self._pool = pool
        self._calls = calls
        self._digests = digests
        self.plain: Candidate | None = None
        self.stages: list[Candidate] = []
        self.is_proposed = False
        self.is_granted = False
        self.wanted: Placement | None = None
        self.recovering = False
        self.holdings: dict[Process, npt.NDArray[np.bool_]] = {}
        # Whether the placement of this epoch, on these nodes, lacks anti-affinity.
        self._lacks_anti_affinity = (0, dict[str, str](), False)
        # The last complaint, to emit each only once.
        self._complained = ""

    def propose(self, stages: Sequence[Candidate], current: Placement) -> str | None:
        """Accept the stages of a proposal as the next candidates; or return the reason for a refusal."""
        for server in stages[-1].servers:
            if server not in self._pool.able and gains(server, current, stages):
                return f"{server} cannot be given experts now"
        self.stages, self.is_proposed = list(stages), True
        return None

    def choose(
        self,
        current: Placement | None,
        now: float,
        *,
        is_new: bool,
        has_waited: bool,
        is_idle: bool,
        gave_up: bool,
    ) -> Chosen:
        """Choose this balancer's first placement, or the one after the current one, if one is due.

        Args:
            current: The current placement; None: this balancer has published none.
            now: Monotonic seconds.
            is_new: This balancer has made no candidate yet.
            has_waited: Servers have had the time to find a monitor that restarted with this balancer.
            is_idle: Servers hold the current placement and nothing else.
            gave_up: A candidate was given up: servers may then have received an epoch above the current one.
        """
        complained, self._complained = self._complained, ""
        try:
            if current is None:
                return self._first(is_new, has_waited)
            return self._next(current, now, is_idle, gave_up)
        except NoCapacityError as error:
            self._complained = str(error)
            is_known = self._complained == complained
            return Chosen(actions=() if is_known else (Complain(str(error)),))

    def _first(self, is_new: bool, has_waited: bool) -> Chosen:
        shape = self._pool.choose_model()
        if shape is None:
            return Chosen()
        full = (shape.num_layers, shape.num_experts)
        able = self._pool.able
        # This balancer has made no candidate yet, so an epoch above 0 is that of a previous balancer.
        self.recovering = self.recovering or bool(self._pool.highest_epoch and is_new)
        if self.recovering:
            # A monitor that has also restarted may not list all servers yet.
            if len(self._pool.alive) < self._expected and not has_waited:
                return Chosen()
            return self._recovered(full)
        # Servers refused for damaged bytes count as present.
        if able and len(able.keys() | self._pool.damaged) >= self._expected:
            return Chosen(first(self._layout, *full, self._pool))
        return Chosen()

    def _recovered(self, full: tuple[int, int]) -> Chosen:
        pool = self._pool
        # Includes newcomers, which may have received an epoch that they have not loaded, and leaving
        # servers, which may be the last with the digests of the experts they hold.
        unknown = [m for m in pool.willing.values() if pool.process(m) not in self.holdings]
        candidate = None
        if not unknown and pool.able:
            self._digests.decide(self.holdings)
            none_LE = np.zeros(full, dtype=np.bool_)
            held = {s: self.holdings.get(pool.process(m), none_LE) for s, m in pool.staying.items()}
            candidate, *self.stages = recovered(held, self._layout, self.wanted, pool)
            self.is_granted = self.wanted is not None
        inspections = self._calls.begin(
            Inspect(m.id, pool.process(m), m.address, *full) for m in unknown
        )
        return Chosen(candidate, actions=tuple(inspections))

    def _next(self, current: Placement, now: float, is_idle: bool, gave_up: bool) -> Chosen:
        if not self._pool.able:
            return Chosen()
        self._pool.most.clear()
        limited = self._pool.capacity_S((*current.servers, *self._pool.able)) is not None
        if limited:
            self._pool.most.update(self._calls.unretired(current))
        # A candidate that was given up has left replicas behind: first restore the current placement.
        clears = limited and gave_up
        candidate = None if clears else with_orphans(current, self._pool, at_rest=is_idle)
        urgent = clears or candidate is not None
        further: list[Candidate] = []
        if candidate is None and not clears and (gave_up or is_idle):
            # With limited memory placements cannot be fully even, so an uneven one is not repaired.
            is_wanted = bool(
                self.is_granted or self.stages or limited or self._serves_partitions(current)
            )
            candidates = repaired(
                *(current, self._pool, self._layout, now),
                is_wanted=is_wanted,
                lacks_anti_affinity=not is_wanted and self._is_lacking(current),
            )
            candidate, further = (candidates[0], candidates[1:]) if candidates else (None, [])
        if candidate is None and gave_up:
            candidate = self.plain
        if candidate is not None:
            # A pending proposal was made before this change, so its stages are dropped.
            self.stages, self.is_proposed = further, False
        elif is_idle:
            candidate = self._if_partitions_changed(current) or self._next_stage(current, limited)
        return Chosen(candidate, urgent)

    def _is_lacking(self, current: Placement) -> bool:
        """Whether the placement lacks anti-affinity, as after a server's return on another node."""
        epoch, nodes, found = self._lacks_anti_affinity
        if (epoch, nodes) != (current.epoch, self._pool.nodes):
            found = self._layout.levels and self._layout.lacks_anti_affinity(
                current.servers, current.holds_LSE, current.shares_LSE
            )
            self._lacks_anti_affinity = current.epoch, self._pool.nodes, found
        return found

    def _next_stage(self, current: Placement, limited: bool) -> Candidate | None:
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
        if limited and self._calls.unretired(current):
            return None
        self.is_granted = True
        return self.stages.pop(0)

    # -- partitions ------------------------------------------------------------------------------

    def for_partitions(self, plain: Candidate) -> Candidate:
        """Add the replicas to a candidate that clients need which reach only part of the servers."""
        able, partitions = self._pool.able, self._pool.reach.partitions
        capacity_S = self._pool.capacity_S(servers_of(plain, able))
        return within_partitions(plain, partitions, able, self._layout.redundancy, capacity_S)

    def _if_partitions_changed(self, current: Placement) -> Candidate | None:
        """Return `plain` as the next candidate if clients now need other replicas; None: nothing changes."""
        if self.plain is None:
            return None
        wanted = self.for_partitions(self.plain)
        is_same = wanted.servers == current.servers and np.array_equal(
            wanted.holds_LSE, current.holds_LSE
        )
        return None if is_same else self.plain

    def _serves_partitions(self, current: Placement) -> bool:
        """Whether the current placement has replicas for partitions: repair must not even them out."""
        return self.plain is not None and bool(current.holds_LSE.sum() > self.plain.holds_LSE.sum())
