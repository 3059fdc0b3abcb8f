"""The balancer of a simulated cluster: the planner, and a minimal roll-out."""

from __future__ import annotations

from typing import Any

import numpy as np

from balancer.planner.actions import Call, Inspect, Prepare, Publish, Retire
from balancer.planner.candidates import Candidate
from balancer.planner.layout import Layout, Settings
from balancer.planner.planner import Planner
from eaas.spares import SpareReplicas
from eaas.types import Placement
from sim_client import ClientProcess
from sim_process import (
    ACK_S,
    EXPERTS,
    GRACE_S,
    LAYERS,
    PUSH_S,
    REDUNDANCY,
    RETRY_S,
    Process,
)

_TICK_S = 0.5
_SPARES_S = 0.4


class BalancerProcess(Process):
    """The planner, and a minimal roll-out."""

    def start(self, wanted: Placement | None) -> None:
        self.planner = Planner(
            self.sim.servers, Layout(Settings(redundancy=REDUNDANCY)), GRACE_S, ACK_S
        )
        if wanted is not None:
            self.planner.remember(wanted)
        self.published: Placement | None = None
        self.join()
        self.push_all()
        self.tick()
        self.spares = SpareReplicas()
        self.push_spares()
        self.fill_spares()

    def on_members(self) -> None:
        # Not registered yet.
        if not self.incarnation:
            return
        now = self.fold.view.members.get(self.id)
        if now is not None and now.pid != self.pid and now.incarnation > self.incarnation:
            # As live: checked before the other's epochs, which this one's next epoch would exceed.
            self.sim.say(f"{self.id}({self.pid}): another one has taken over")
            self.alive = False
        else:
            self.act(self.planner.observe(self.fold.view.members, self.sim.now))

    def tick(self) -> None:
        if self.incarnation:
            self.act(self.planner.tick(self.sim.now))
        self.soon(_TICK_S, self.tick)

    def act(self, actions: Any) -> None:
        for action in actions:
            if isinstance(action, Publish):
                self.sim.say(f"{self.id}({self.pid}): publish {action.placement.epoch}")
                self.published = action.placement
                self.sim.published[self.published.epoch] = (self.sim.now, self)
                self.push_now()
            elif isinstance(action, Inspect | Prepare | Retire):
                if isinstance(action, Prepare):
                    self.sim.wanted = action.placement
                self.send(action)

    def send(self, call: Call) -> None:
        def done(told: tuple[Any, int] | None) -> None:
            self.planner.succeeded(call, *(told or ()))
            self.act(self.planner.tick(self.sim.now))

        def failed() -> None:
            self.soon(RETRY_S, lambda: self.planner.is_wanted(call) and self.send(call))
            self.act(self.planner.failed(call, self.sim.now))

        pid = int(call.address.rpartition(":")[2])
        self.sim.call(self, call.server_id, lambda s: s.order(call), done, failed, pid=pid)

    def push_all(self) -> None:
        self.push_now()
        self.soon(PUSH_S, self.push_all)

    def push_now(self) -> None:
        placement = self.published
        if placement is None:
            return
        behind = [
            p
            for p in self.sim.processes
            if isinstance(p, ClientProcess) and p.alive and p.epoch < placement.epoch
        ]
        message = placement.to_proto() if behind else None
        for process in behind:
            self.sim.stream(self, process, lambda p=process: p.take_placement(message))

    def fill_spares(self) -> None:
        """`balancer.spare_slots` with random replicas: new ones every round, and any call may be lost."""
        self.soon(_SPARES_S, self.fill_spares)
        placement = self.planner.current
        if not self.incarnation or placement is None or not self.planner.is_at_rest:
            return
        dice, places = self.sim.dice, [(at, e) for at in range(LAYERS) for e in range(EXPERTS)]
        wanted = SpareReplicas(
            placement.epoch,
            {server: frozenset(dice.sample(places, 2)) for server in placement.servers},
        )
        kept = self.spares if self.spares.epoch == wanted.epoch else SpareReplicas(wanted.epoch)
        self.spares = kept.intersection(wanted)
        self.push_spares()

        def done(server: str, held: frozenset[tuple[int, int]]) -> None:
            if self.spares.epoch == wanted.epoch:
                held_now = dict(self.spares.held) | {server: held & wanted.of(server)}
                self.spares = SpareReplicas(wanted.epoch, held_now)
                self.push_spares()

        for server in placement.servers:
            self.sim.call(
                self,
                server,
                lambda s: s.hold_spares(wanted),
                lambda held, server=server: done(server, held),
                lambda: None,
            )

    def push_spares(self) -> None:
        spares = self.spares
        for process in self.sim.processes:
            if isinstance(process, ClientProcess) and process.alive:
                self.sim.stream(self, process, lambda p=process: p.take_spares(spares))

    def propose_any(self) -> None:
        """Propose a random placement, like an operator."""
        now = self.planner.current
        if now is None:
            return
        rng = np.random.default_rng(self.sim.dice.getrandbits(32))
        replicas = min(REDUNDANCY, len(now.servers))
        holds_LSE = rng.random(now.holds_LSE.shape).argsort(1).argsort(1) < replicas
        shares_LSE = (holds_LSE / replicas).astype(np.float32)
        self.planner.propose([Candidate(now.servers, holds_LSE, shares_LSE)], now.epoch)
