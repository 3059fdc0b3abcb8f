"""From the load to placements: plans when there is a reason, and has the planner roll out what pays.

    servers' hotness --> LoadState --> a trigger --> weigh --> Planner.propose --> the one roll-out there is
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

from balancer.drafts import Draft
from balancer.live.away import among_the_living, with_the_dead
from balancer.live.history import History
from balancer.live.hotness import Reading
from balancer.live.mind import STATIC_POLICY, Settings, Situation, weigh
from balancer.live.plans import VERDICTS, Glimpse, NotNowError, Planned
from balancer.live.stages import stages
from balancer.live.state import LiveLayout, LoadState
from balancer.live.tuning import Tuning
from balancer.planner import Planner
from balancer.policies.types import Float
from eaas.config import BalancerConfig
from eaas.log import get_logger
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas.types import Placement

__all__ = ["Rebalancer"]

_log = get_logger(__name__)
_PLANS_KEPT = 32


class Rebalancer:
    """Decides; the planner carries out. Any thread may call it.

    Args:
        config: The balancer's settings.
        layout: What the planner makes placements by; its settings are the ones in force.
        ask: Asks the planner on its thread.
        history: Of decisions.
        tuning: Has knobs set from the load; None: they stay.
        on_change: Called when an operator wants something else from now on.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        config: BalancerConfig,
        layout: LiveLayout,
        ask: Callable[[Callable[[Planner], Any]], Any],
        history: History,
        tuning: Tuning | None = None,
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._layout = layout
        self._ask = ask
        self.history = history
        self._tuning = tuning
        self._on_change = on_change
        self._clock = clock
        self._plans: OrderedDict[str, Planned] = OrderedDict()
        # One decision at a time: two plans from one placement would not know of each other.
        self._deciding = threading.RLock()

    @property
    def load(self) -> LoadState | None:
        """What was seen; None before a model is known."""
        return self._layout.load

    @property
    def settings(self) -> Settings:
        """In force."""
        return self._layout.settings

    def glimpse(self) -> Glimpse:
        """What the planner knows now."""
        found: Glimpse = self._ask(Glimpse.of)
        return found

    # -- by itself --------------------------------------------------------------------------------

    def look(self, readings: Mapping[str, Reading], now: Glimpse, expert_bytes: int) -> None:
        """Servers were asked for what they computed; what is due is done."""
        if now.placement is None:
            return
        if self._layout.load is None:
            layers, _, experts = now.placement.holds_LSE.shape
            self._layout.load = LoadState(self._config, layers, experts)
        load = self._layout.load
        reason = load.stepped(readings, now.servers, now.placement, expert_bytes)
        if self._tuning is not None:
            self._tuning.look(load, readings, now.clients)
        if reason is None or self.settings.policy == STATIC_POLICY or not now.at_rest:
            return
        if not now.able >= {*now.placement.servers} - {*now.away}:
            return  # Somebody leaves, or is suspected: the planner knows what to do.
        trigger, why = reason
        if trigger == "drift":
            load.forget_the_past()
        try:
            with self._deciding:
                self._decide(trigger, why, now)
        except (NotNowError, ValueError) as error:
            _log.warning("no plan (%s): %s", why, error)

    def _decide(self, trigger: str, why: str, now: Glimpse) -> None:
        planned = self._plan_now(self.settings, now)
        proposal = planned.proposal
        _log.info("%s: %s: %s", trigger, proposal.kind, proposal.reason)
        drafts = self._drafts(planned, proposal.holds_LSE, proposal.shares_LSE)
        if proposal.kind == "nothing":
            drafts = []
        self._record(planned, trigger, f"{why}; {proposal.reason}", drafts)
        assert self.load is not None
        par_L = proposal.par_now_L if proposal.kind == "nothing" else proposal.par_then_L
        self.load.planned(planned.situation, par_L)

    def _plan_now(self, settings: Settings, now: Glimpse) -> Planned:
        """Where plans are not made beside roll-outs, on the planner's own thread."""
        if self._config.use_async:
            return self.plan(settings, now)
        planned: Planned = self._ask(lambda _planner: self.plan(settings, now))
        return planned

    # -- by an operator's word --------------------------------------------------------------------

    def plan(
        self,
        settings: Settings,
        now: Glimpse,
        situation: Situation | None = None,
    ) -> Planned:
        """What another placement is worth; nothing changes.

        It is a plan for the servers that live. One that is dead keeps what the placement gives it.

        Args:
            settings: What is wanted.
            now: What the planner knows.
            situation: In place of the cluster's own.

        Raises:
            NotNowError: There is no placement, no load was seen yet, or no server lives.
            ValueError: The policy cannot do that; says why.
        """
        load, placement = self.load, now.placement
        if placement is None:
            raise NotNowError("there is no placement yet")
        # The loads may be others than those that were seen; the servers must be there.
        applicable = situation is None or situation.servers == placement.servers
        if situation is None:
            if load is None:
                raise NotNowError("no load has been seen yet")
            situation = among_the_living(load, placement, now.away)
        if not situation.load_LE.any():
            raise NotNowError("no load has been seen yet: send some requests, or give loads")
        began = self._clock()
        proposal = weigh(settings, situation)
        planned = Planned(
            id=secrets.token_hex(8),
            settings=settings,
            situation=situation,
            proposal=proposal,
            placement=placement,
            plan_s=self._clock() - began,
            applicable=applicable,
        )
        self._plans[planned.id] = planned
        while len(self._plans) > _PLANS_KEPT:
            self._plans.popitem(last=False)
        return planned

    def find(self, plan_id: str) -> Planned | None:
        """A plan that was made a short time ago."""
        return self._plans.get(plan_id)

    def rebalance(self, policy: str, *, force: bool) -> tuple[Planned, int]:
        """Plans, and rolls out what pays; or what was planned, if it is forced.

        Returns:
            The plan, and the number of placements that it takes; 0: nothing is done.

        Raises:
            NotNowError: There is no placement or no load, or a roll-out is going on.
            ValueError: As `plan`.
        """
        with self._deciding:
            now = self.glimpse()
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
        """Rolls a plan out. Returns the number of placements that it takes; 0: it is what there is.

        Args:
            planned: The plan.
            force: The layout that was planned, whether it pays or not; else what is best, be it nothing.

        Raises:
            NotNowError: It is of another cluster or of an older placement, or a roll-out is going on.
        """
        if not planned.applicable:
            raise NotNowError("this plan is of a cluster that is not there")
        proposal = planned.proposal
        best = proposal.holds_LSE, proposal.shares_LSE
        drafts = self._drafts(planned, *(proposal.planned if force else best))
        with self._deciding:
            self._record(planned, "manual", proposal.reason, drafts)
            if self.load is not None:
                self.load.planned(planned.situation, proposal.par_then_L)
        return len(drafts)

    def place(self, wanted: Draft, reason: str, placement: Placement) -> int:
        """Rolls a layout out that an operator asks for; room is left to who asks.

        Returns:
            1, or 0 where it is what there is.

        Raises:
            NotNowError: The placement is another one than `placement` by now, or a roll-out is going on.
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
        """Replicas are to be even again, however it came that they are not."""
        self._ask(lambda planner: planner.level())

    def change(self, **fields: Any) -> None:
        """From now on something else is wanted (`Settings`)."""
        self._layout.change(**fields)
        self._on_change()

    # -- carrying out -----------------------------------------------------------------------------

    def _drafts(self, planned: Planned, holds_LSE: Any, shares_LSE: Any) -> list[Draft]:
        """On the way to a layout of those that live; empty where it is what there is."""
        now, proposal = planned.situation, planned.proposal
        moved = bool((holds_LSE != now.holds_LSE).any())
        if not moved and np.allclose(shares_LSE, now.shares_LSE, atol=1e-6):
            return []
        moves = proposal.moves if moved else ()
        gain_L: Float = proposal.par_now_L - proposal.par_then_L
        order = tuple(np.argsort(-gain_L, kind="stable").tolist())
        found = stages(now.holds_LSE, now.shares_LSE, holds_LSE, shares_LSE, moves, now.room_S)
        return [Draft(now.servers, holds, shares, order) for holds, shares in found]

    def _record(self, planned: Planned, trigger: str, reason: str, drafts: list[Draft]) -> None:
        proposal = planned.proposal
        loads = 0
        if drafts:
            loads = int(np.count_nonzero(drafts[-1].holds_LSE > planned.situation.holds_LSE))
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
        if drafts:
            placement = planned.placement
            self._propose([with_the_dead(d, placement) for d in drafts], placement.epoch, entry)
        else:
            self.history.decided(entry)

    def _propose(self, drafts: list[Draft], epoch: int, entry: pb.HistoryEntry) -> None:
        """Raises NotNowError; then nothing is remembered."""

        def propose(planner: Planner) -> str | None:
            refusal = planner.propose(drafts, epoch)
            if refusal is None:
                # On the planner's thread: before the first phase of these can come.
                self.history.decided(entry, drafts)
            return refusal

        refusal = self._ask(propose)
        if refusal is not None:
            raise NotNowError(refusal)
