"""Chooses the planner's next candidate: a first or recovered placement, for orphans, a repair, a proposal.

No I/O, no clock. `candidates` makes the placements; this module decides which of them is due.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from balancer.planner.actions import Action, Complain, Inspect, Life
from balancer.planner.audiences import Audiences
from balancer.planner.candidates import Candidate, first, recovered, repaired, with_orphans
from balancer.planner.constraints import Constraints
from balancer.planner.digests import ExpertDigests
from balancer.planner.layout import Layout
from balancer.planner.ledger import Ledger
from balancer.planner.pool import ServerPool
from balancer.planner.steps import Steps
from balancer.policies.capacity import NoCapacityError
from eaas.membership.cluster_view import RETURN_GRACE_S
from eaas.types import Placement

__all__ = ["Choice", "Chosen"]


@dataclass(frozen=True, eq=False)
class Chosen:
    """What to do next.

    Attributes:
        candidate: The placement to begin; None: none is due.
        is_urgent: Its loads must not be given up for orphans.
        is_change: It follows a change of the servers: a pending proposal, made before, is dropped.
        actions: Actions due.
    """

    candidate: Candidate | None = None
    is_urgent: bool = False
    is_change: bool = False
    actions: tuple[Action, ...] = ()


class Choice:
    """Chooses candidates from the state that the planner's parts hold.

    Args:
        expected_servers: Expert servers to wait for before the first placement.
        layout: Lays out placements.
        pool, ledger, digests, steps, constraints, audiences: The planner's.

    Attributes:
        recovering: Whether the cluster runs with a previous balancer's placement, or did at the start.
        holdings: What servers answered to `Inspect`: experts that they hold, bool (L, E).
    """

    def __init__(
        self,
        expected_servers: int,
        layout: Layout,
        pool: ServerPool,
        ledger: Ledger,
        digests: ExpertDigests,
        steps: Steps,
        constraints: Constraints,
        audiences: Audiences,
    ) -> None:
        self._expected = expected_servers
        self._layout = layout
        self._pool = pool
        self._ledger = ledger
        self._digests = digests
        self._steps = steps
        self._constraints = constraints
        self._audiences = audiences
        self.recovering = False
        self.holdings: dict[Life, npt.NDArray[np.bool_]] = {}
        self._nodes: Mapping[str, str] = {}
        # Epoch, and whether replicas of that placement share nodes that need not; None: not known.
        self._shares_nodes: tuple[int, bool] | None = None
        # The last complaint, to emit each only once.
        self._complained = ""

    def know_nodes(self) -> None:
        """Tell the layout the servers' nodes, if they have changed."""
        if self._nodes != (nodes := self._pool.nodes):
            self._nodes = nodes
            self._layout.know(nodes)
            self._shares_nodes = None

    def first(self, now: float, first_seen_at: float | None, *, is_new: bool) -> Chosen:
        """Choose this balancer's first placement: recover a running cluster, or start a new one.

        Args:
            now: Monotonic seconds.
            first_seen_at: When the first cluster view came; None: none has come.
            is_new: This balancer has made no candidate yet.
        """
        return self._or_complaint(lambda: self._first(now, first_seen_at, is_new))

    def next(self, current: Placement, now: float, *, idle: bool, gave_up: bool) -> Chosen:
        """Choose the placement after the current one, if one is due: for orphans first, then repair.

        Args:
            current: The current placement.
            now: Monotonic seconds.
            idle: Servers hold the current placement and nothing else.
            gave_up: A candidate was given up: servers may then have received an epoch above the current one.
        """
        return self._or_complaint(lambda: self._next(current, now, idle, gave_up))

    def _or_complaint(self, choose: Callable[[], Chosen]) -> Chosen:
        complained, self._complained = self._complained, ""
        try:
            return choose()
        except NoCapacityError as error:
            self._complained = str(error)
            is_known = self._complained == complained
            return Chosen(actions=() if is_known else (Complain(str(error)),))

    def _first(self, now: float, first_seen_at: float | None, is_new: bool) -> Chosen:
        shape = self._pool.choose_model()
        if shape is None:
            return Chosen()
        full = (shape.num_layers, shape.num_experts)
        able, staying = self._pool.able, self._pool.staying
        # This balancer has made no candidate yet, so an epoch above 0 is that of a previous balancer.
        self.recovering = self.recovering or bool(self._pool.highest_epoch and is_new)
        if not self.recovering:
            # Servers refused for damaged bytes count as present.
            if able and len(able.keys() | self._pool.damaged) >= self._expected:
                return Chosen(first(self._layout, *full, self._pool))
            return Chosen()
        # A monitor that has also restarted may not list all servers yet.
        assert first_seen_at is not None
        if len(self._pool.alive) < self._expected and now < first_seen_at + RETURN_GRACE_S:
            return Chosen()
        # Includes newcomers, which may have received an epoch that they have not loaded, and leaving
        # servers, which may be the last with the digests of the experts they hold.
        unknown = [
            m for m in self._pool.willing.values() if self._pool.life(m) not in self.holdings
        ]
        candidate = None
        if not unknown and able:
            self._digests.decide(self.holdings)
            none_LE = np.zeros(full, dtype=np.bool_)
            held = {s: self.holdings.get(self._pool.life(m), none_LE) for s, m in staying.items()}
            constraints = self._constraints
            candidate, *constraints.stages = recovered(
                held, self._layout, constraints.wanted, self._pool
            )
            constraints.is_granted = constraints.wanted is not None
        asked = self._ledger.begin(
            [Inspect(m.id, self._pool.life(m), m.address, *full) for m in unknown]
        )
        return Chosen(candidate, actions=tuple(asked))

    def _next(self, current: Placement, now: float, idle: bool, gave_up: bool) -> Chosen:
        if not self._pool.able:
            return Chosen()
        self._pool.most.clear()
        limited = self._pool.capacity_S((*current.servers, *self._pool.able)) is not None
        if limited:
            self._pool.most.update(self._steps.most_of_unheard(current))
        # A candidate that was given up has left replicas behind: first restore the current placement.
        clears = limited and gave_up
        candidate = None if clears else with_orphans(current, self._pool, at_rest=idle)
        urgent = clears or candidate is not None
        further: list[Candidate] = []
        if candidate is None and not clears and (gave_up or idle):
            # With limited memory placements cannot be fully even, so an uneven one is not repaired.
            is_wanted = (
                self._constraints.keeps_as_is or limited or self._audiences.has_more(current)
            )
            candidates = repaired(
                *(current, self._pool, self._layout, now),
                is_wanted=is_wanted,
                shares_nodes=not is_wanted and self._share_nodes(current),
            )
            candidate, further = (candidates[0], candidates[1:]) if candidates else (None, [])
        if candidate is None and gave_up:
            candidate = self._audiences.plain
        is_change = candidate is not None
        if is_change:
            # A pending proposal was made before this change, so its stages are dropped.
            self._constraints.stages = further
        elif idle:
            candidate = self._audiences.due(current) or self._constraints.next_stage(
                current, limited
            )
        return Chosen(candidate, urgent, is_change)

    def _share_nodes(self, current: Placement) -> bool:
        """Whether replicas of the placement share nodes that need not, as after a change of a node's name."""
        if self._shares_nodes is None or self._shares_nodes[0] != current.epoch:
            servers, holds_LSE, shares_LSE = current.servers, current.holds_LSE, current.shares_LSE
            found = self._layout.levels and self._layout.gets_apart(servers, holds_LSE, shares_LSE)
            self._shares_nodes = current.epoch, found
        return self._shares_nodes[1]
