"""Rebalancer: plans on a trigger or an operator's call, and proposes worthwhile layouts to the planner.

    servers' hotness --> LoadState --> a trigger --> weigh --> Planner.propose --> the only roll-out
    operators' calls ------------------------------>--+

Shape suffixes: L layers, S servers, E logical experts.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from balancer.live.cost_benefit import weigh
from balancer.live.history import History
from balancer.live.hotness import Reading
from balancer.live.plans import VERDICTS, NotNowError, Planned, PlannerSnapshot
from balancer.live.state import LoadState
from balancer.live.tuning import Tuning
from balancer.planner.candidates import Candidate, with_the_dead
from balancer.planner.layout import STATIC_POLICY, Layout, Settings, Situation
from balancer.planner.planner import Planner
from balancer.planner.stages import stages
from balancer.policies.types import Float
from eaas.config import BalancerConfig
from eaas.log import get_logger
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.types import Placement

__all__ = ["Rebalancer"]

_log = get_logger(__name__)
_PLANS_KEPT = 32


class Rebalancer:
    """Decides, by load or on an operator's call, which layout to propose to the planner. Thread-safe.

    Args:
        config: The balancer's settings.
        layout: Makes the planner's layouts; holds the settings in force.
        load: Collects the servers' readings.
        ask: Runs a function of the planner on the planner's thread.
        history: Records decisions.
        tuning: Sets the policy's knobs by the load; None: they stay.
        on_change: Called when an operator changes the settings.
    """

    def __init__(
        self,
        config: BalancerConfig,
        layout: Layout,
        load: LoadState,
        ask: Callable[[Callable[[Planner], Any]], Any],
        history: History,
        tuning: Tuning | None = None,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._config = config
        self._layout = layout
        self.load = load
        self._ask = ask
        self.history = history
        self._tuning = tuning
        self._on_change = on_change
        self._plans: OrderedDict[str, Planned] = OrderedDict()
        # One decision at a time: two plans from one placement would conflict.
        self._deciding = threading.RLock()

    @property
    def settings(self) -> Settings:
        """The settings in force, of the operator and the control loop, for the next plan."""
        return self._layout.settings

    def snapshot(self) -> PlannerSnapshot:
        """Take a snapshot of the planner's current state, on its thread; plans start from it."""
        found: PlannerSnapshot = self._ask(PlannerSnapshot.of)
        return found

    # -- automatic --------------------------------------------------------------------------------

    def observe(
        self, readings: Mapping[str, Reading], now: PlannerSnapshot, expert_bytes: int
    ) -> None:
        """Record the servers' readings of one step, for the reader; rebalance if a trigger fires."""
        if now.placement is None:
            return
        reason = self.load.stepped(readings, now.servers, now.placement, expert_bytes)
        if self._tuning is not None:
            self._tuning.step(self.load, readings, now.clients)
        if reason is None or self.settings.policy == STATIC_POLICY or not now.at_rest:
            return
        if not now.able >= {*now.placement.servers} - {*now.away}:
            return  # A server is leaving or suspected: the planner handles that.
        trigger, why = reason
        if trigger == "drift":
            self.load.forget_the_past()
        try:
            with self._deciding:
                self._decide(trigger, why, now)
        except (NotNowError, ValueError) as error:
            _log.warning("no plan (%s): %s", why, error)

    def _decide(self, trigger: str, why: str, now: PlannerSnapshot) -> None:
        planned = self._plan_now(self.settings, now)
        proposal = planned.proposal
        _log.info("%s: %s: %s", trigger, proposal.kind, proposal.reason)
        candidates = self._candidates(planned, proposal.holds_LSE, proposal.shares_LSE)
        if proposal.kind == "nothing":
            candidates = []
        self._record(planned, trigger, f"{why}; {proposal.reason}", candidates)
        par_L = proposal.par_now_L if proposal.kind == "nothing" else proposal.par_then_L
        self.load.planned(planned.situation, par_L)

    def _plan_now(self, settings: Settings, now: PlannerSnapshot) -> Planned:
        """Plan on this thread; without `use_async` on the planner's, which does nothing else meanwhile."""
        if self._config.use_async:
            return self.plan(settings, now)
        planned: Planned = self._ask(lambda _planner: self.plan(settings, now))
        return planned

    # -- operators' calls -------------------------------------------------------------------------

    def plan(
        self,
        settings: Settings,
        now: PlannerSnapshot,
        situation: Situation | None = None,
    ) -> Planned:
        """Plan without changing anything; the plan is kept for `find`.

        The plan is for the live servers. A dead one keeps its part of the placement.

        Args:
            settings: Settings to plan with.
            now: The planner's state.
            situation: Replaces the cluster's own situation.

        Raises:
            NotNowError: There is no placement, no observed load, or no live server.
            ValueError: The policy cannot plan this; the message says why.
        """
        placement = now.placement
        if placement is None:
            raise NotNowError("there is no placement yet")
        # The loads may be hypothetical; the servers must exist.
        applicable = situation is None or situation.servers == placement.servers
        if situation is None:
            situation = now.situation(self.load)
        if not situation.load_LE.any():
            raise NotNowError("no load has been seen yet: send some requests, or give loads")
        began = time.monotonic()
        proposal = weigh(settings, situation)
        planned = Planned(
            id=secrets.token_hex(8),
            settings=settings,
            situation=situation,
            proposal=proposal,
            placement=placement,
            plan_s=time.monotonic() - began,
            applicable=applicable,
        )
        self._plans[planned.id] = planned
        while len(self._plans) > _PLANS_KEPT:
            self._plans.popitem(last=False)
        return planned

    def find(self, plan_id: str) -> Planned | None:
        """Return a recent plan by its id, for an operator to apply; None: unknown or too old."""
        return self._plans.get(plan_id)

    def rebalance(self, policy: str, *, force: bool) -> tuple[Planned, int]:
        """Plan on an operator's call, and begin to roll the plan out if it pays or is forced.

        Returns:
            The plan, and the number of placements that its roll-out takes; 0: nothing is done.

        Raises:
            NotNowError: There is no placement or no load, or a roll-out is in progress.
            ValueError: As `plan`.
        """
        with self._deciding:
            now = self.snapshot()
            settings = self.settings
            if policy and policy != settings.policy:
                settings = replace(settings, policy=policy, knobs={})
            planned = self._plan_now(settings, now)
            proposal = planned.proposal
            if proposal.kind == "nothing" and not force:
                self._record(planned, "manual", proposal.reason, [])
                return planned, 0
            return planned, self.apply(planned, force=force)

    def apply(self, planned: Planned, *, force: bool = False) -> int:
        """Begin to roll out a plan; return the number of placements that this takes, 0 if nothing changes.

        Args:
            planned: The plan.
            force: Roll out the planned layout even if it does not pay.

        Raises:
            NotNowError: The plan is for another cluster or an older placement, or a roll-out is in progress.
        """
        if not planned.applicable:
            raise NotNowError("this plan is for a hypothetical cluster")
        proposal = planned.proposal
        best = proposal.holds_LSE, proposal.shares_LSE
        candidates = self._candidates(planned, *(proposal.planned if force else best))
        with self._deciding:
            self._record(planned, "manual", proposal.reason, candidates)
            self.load.planned(planned.situation, proposal.par_then_L)
        return len(candidates)

    def place(self, wanted: Candidate, reason: str, placement: Placement) -> int:
        """Begin to roll out an operator's layout, without a check of memory or of whether it pays.

        Returns:
            1, or 0 if it is the current layout.

        Raises:
            NotNowError: The placement is no longer `placement`, or a roll-out is in progress.
        """
        same = wanted.servers == placement.servers and bool(
            (wanted.holds_LSE == placement.holds_LSE).all()
            and np.allclose(wanted.shares_LSE, placement.shares_LSE, atol=1e-6)
        )
        if same:
            return 0
        entry = pb.HistoryEntry(
            trigger="operator",
            policy=self.settings.policy,
            verdict=pb.VERDICT_MOVES,
            reason=reason,
            epoch_before=placement.epoch,
        )
        with self._deciding:
            self._propose([wanted], placement.epoch, entry)
        return 1

    def level(self) -> None:
        """Allow the planner to even the replicas out again, even those of an operator's placement."""
        self._ask(lambda planner: planner.level())

    def change(self, **fields: Any) -> None:
        """Change the operator's settings for later placements (fields of `Settings`), and store them."""
        self._layout.change(**fields)
        self._on_change()

    # -- roll-out ---------------------------------------------------------------------------------

    def _candidates(self, planned: Planned, holds_LSE: Any, shares_LSE: Any) -> list[Candidate]:
        """Make the candidates that lead to a layout of the live servers; empty if it is the current one."""
        now, proposal = planned.situation, planned.proposal
        moved = bool((holds_LSE != now.holds_LSE).any())
        if not moved and np.allclose(shares_LSE, now.shares_LSE, atol=1e-6):
            return []
        moves = proposal.moves if moved else ()
        gain_L: Float = proposal.par_now_L - proposal.par_then_L
        order = tuple(np.argsort(-gain_L, kind="stable").tolist())
        found = stages(now.holds_LSE, now.shares_LSE, holds_LSE, shares_LSE, moves, now.capacity_S)
        return [Candidate(now.servers, holds, shares, order) for holds, shares in found]

    def _record(
        self, planned: Planned, trigger: str, reason: str, candidates: list[Candidate]
    ) -> None:
        proposal = planned.proposal
        loads = 0
        if candidates:
            loads = int(np.count_nonzero(candidates[-1].holds_LSE > planned.situation.holds_LSE))
        entry = pb.HistoryEntry(
            trigger=trigger,
            policy=planned.settings.policy,
            verdict=VERDICTS[proposal.kind],
            reason=reason,
            par_now=float(proposal.par_now_L.mean()),
            par_then=float(proposal.par_then_L.mean()),
            bound=float(proposal.bound_L.mean()),
            transit=loads,
            bytes=loads * planned.situation.expert_bytes,
            epoch_before=planned.placement.epoch,
            plan_s=planned.plan_s,
        )
        if candidates:
            placement = planned.placement
            self._propose([with_the_dead(d, placement) for d in candidates], placement.epoch, entry)
        else:
            self.history.decided(entry)

    def _propose(self, candidates: list[Candidate], epoch: int, entry: pb.HistoryEntry) -> None:
        """Propose candidates to the planner and record them. Raises NotNowError if it refuses them."""

        def propose(planner: Planner) -> str | None:
            refusal = planner.propose(candidates, epoch)
            if refusal is None:
                # Recorded on the planner's thread, so before the first phase of these candidates.
                self.history.decided(entry, candidates)
            return refusal

        refusal = self._ask(propose)
        if refusal is not None:
            raise NotNowError(refusal)
