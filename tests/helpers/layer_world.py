"""Fakes for a layer call: connections and a clock, without slots, threads or real time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from prometheus_client import CollectorRegistry

from attention_client.connections.deadlines import HedgeBudget, ServiceTimes
from attention_client.connections.messages import Answer, LayerInput, Ticket
from attention_client.dispatch import dispatch_policy
from attention_client.dispatch.parts import Part
from attention_client.layer_call.call import Arguments, LayerCall
from attention_client.layer_call.shared import CallContext, ClusterView
from attention_client.telemetry.metrics import ClientMetrics
from eaas.errors import (
    ConnectionLostError,
    SlotCorruptError,
    SlotsBusyError,
)
from eaas.types import Placement
from eaas.wire import ResultHeader
from eaas.wire.slot import Status, WireDtype

HIDDEN = 4
TIMEOUT_S = 3.0
FAULTS = ("lost", "busy", "silent", "late", "stale", "internal", "corrupt", "torn", "invalid")


@dataclass
class World:
    """The clock, and the record of everything the fakes were asked."""

    now: float = 100.0
    pairs: list[tuple[str, int, int]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def clock(self) -> float:
        return self.now


class FakeConnection:
    """Answers each request with the next outcome of its script after a delay; then always `forever`."""

    incarnation = 1

    def __init__(
        self, world: World, name: str, script: tuple[str, ...] = (), *, delay_s: float = 0.01,
        forever: str = "ok", room: int = 1000, owes: bool = False,
    ) -> None:  # fmt: skip
        self.world, self.server_id, self.script = world, name, deque(script)
        self.delay_s, self.forever, self.room, self.owes = delay_s, forever, room, owes
        self.lost_reason: str | None = None
        self.service = ServiceTimes()
        self.service.observe(1, 0.001)
        self.open: dict[Ticket, tuple[str, float, np.ndarray]] = {}
        self.reading: dict[Ticket, tuple[str, np.ndarray]] = {}
        self.abandoned = 0
        self.sizes: list[int] = []
        self.epochs: list[int] = []

    @property
    def work_in_flight(self) -> float:
        return float(len(self.open))

    def max_tokens(self, top_k: int, dtype: WireDtype) -> int:
        return self.room

    def owes_answer(self) -> bool:
        return self.owes

    def submit(
        self, inputs: LayerInput, epoch: int, part: Part, budget_s: float, _trace: bytes = b""
    ) -> Ticket:
        assert budget_s > 0
        x_RH, scores_RK = inputs.x_TH[part.rows_R], inputs.scores_TK[part.rows_R]
        assert len(part.ids_RK) <= self.room
        if self.lost_reason is not None:
            raise ConnectionLostError(self.lost_reason)
        outcome = self.script.popleft() if self.script else self.forever
        self.world.asked.append(self.server_id)
        if outcome == "busy":
            raise SlotsBusyError(self.server_id)
        self.sizes.append(len(part.ids_RK))
        self.epochs.append(epoch)
        if outcome == "ok":
            self.world.pairs += [(self.server_id, int(x[0]), int(e)) for x, row in
                                 zip(x_RH, part.ids_RK, strict=True) for e in row if e >= 0]  # fmt: skip
        ready = {"silent": np.inf, "late": 50.0}.get(outcome, self.delay_s)
        with np.errstate(invalid="ignore"):
            weight_R = np.where(part.pairs_RK, scores_RK * (part.ids_RK + 1), 0).sum(axis=1)
        ticket = Ticket(0, len(self.world.asked), len(part.ids_RK), part.work)
        answer = x_RH * weight_R.astype(np.float32)[:, None]
        self.open[ticket] = (outcome, self.world.now + ready, answer)
        return ticket

    def seq(self) -> int:
        return 0

    def wait(self, ticket: Ticket, seen_seq: int, timeout_s: float) -> None:
        due = min(ready for _, ready, _ in self.open.values())
        self.world.now += max(min(due - self.world.now, timeout_s), 1e-6)

    def poll(self, ticket: Ticket) -> Answer | None:
        outcome, ready, answer = self.open[ticket]
        if self.lost_reason is None and self.world.now < ready:
            return None
        del self.open[ticket]
        if outcome in ("ok", "torn") and self.lost_reason is None:
            self.reading[ticket] = outcome, answer
        if outcome == "lost":
            self.lost_reason = f"{self.server_id}: gone"
        if self.lost_reason is not None:
            raise ConnectionLostError(self.lost_reason)
        if outcome == "corrupt":
            raise SlotCorruptError("not an answer to this")
        status = {
            "stale": Status.STALE_PLACEMENT,
            "internal": Status.INTERNAL,
            "invalid": Status.INVALID_ARGUMENT,
        }.get(outcome, Status.OK)
        service_us = int(self.delay_s * 1e6)
        header = ResultHeader.of(
            status, generation=1, request_id=ticket.request_id, service_us=service_us
        )
        return Answer(header, answer if status is Status.OK else None)

    def release(self, ticket: Ticket) -> bool:
        outcome, answer = self.reading.pop(ticket)
        answer[...] = np.nan  # The slot's next owner may write there from now on.
        if outcome == "torn":
            self.lost_reason = f"{self.server_id}: took its slots back"
        return outcome == "ok"

    def abandon(self, ticket: Ticket, *, overdue: bool) -> None:
        assert ticket not in self.reading
        self.abandoned += self.open.pop(ticket, None) is not None


class FakeReplicas:
    def __init__(self, world: World, views: list[ClusterView], change_s: float = np.inf) -> None:
        self.world, self.views, self.change_at = world, views, world.now + change_s

    def view(self) -> ClusterView:
        return self.views[-1] if self.world.now >= self.change_at else self.views[0]

    def wait_for_change(self, seen: ClusterView, timeout_s: float) -> None:
        assert timeout_s >= 0
        if self.view() is seen:
            over = self.world.now + max(timeout_s, 1e-6)
            self.world.now = self.change_at if self.world.now < self.change_at < over else over


def view_of(connections: list, holds_SE: np.ndarray, epoch: int = 1) -> ClusterView:
    holds_LSE = holds_SE[None].astype(bool)
    shares_LSE = (holds_LSE / np.maximum(holds_LSE.sum(1, keepdims=True), 1)).astype(np.float32)
    names = tuple(f"s{i}" for i in range(len(connections)))
    return ClusterView(Placement(epoch, names, holds_LSE, shares_LSE), tuple(connections))


@dataclass
class Call:
    """A layer call and its arguments."""

    x_TH: torch.Tensor
    ids_TK: np.ndarray
    scores_TK: np.ndarray
    wanted_T: np.ndarray
    shared: CallContext

    def run(self) -> torch.Tensor:
        ids_TK, scores_TK, wanted_T = map(
            torch.from_numpy, (self.ids_TK, self.scores_TK, self.wanted_T)
        )
        arguments = Arguments(0, self.x_TH, ids_TK, scores_TK, wanted_T)
        return LayerCall(self.shared, arguments).finish()

    def check(self) -> None:
        """Run, and compare with the right sum."""
        assert torch.equal(self.run(), self.expected())

    def expected(self) -> torch.Tensor:
        weight_T = ((self.ids_TK + 1) * self.scores_TK).sum(axis=1) * self.wanted_T
        return self.x_TH * torch.from_numpy(weight_T.astype(np.float32))[:, None]

    @property
    def metrics(self) -> ClientMetrics:
        return self.shared.metrics


def call_of(
    world: World,
    replicas: FakeReplicas,
    ids_TK: np.ndarray,
    *,
    attempt_timeout_s: float = 0.1,
    policy: str = "least_loaded",
    hedge_share: float = 0.0,
    **changes: Any,
) -> Call:
    tokens = len(ids_TK)
    # The first column identifies the token. Whole numbers make every order of summation exact.
    x_TH = (torch.arange(tokens)[:, None] + torch.arange(HIDDEN) * tokens).float()
    given = {
        "x_TH": x_TH,
        "ids_TK": ids_TK,
        "scores_TK": np.ones(ids_TK.shape, dtype=np.float32),
        "wanted_T": np.ones(tokens, dtype=bool),
        "shared": CallContext(
            replicas,
            dispatch_policy(policy),
            TIMEOUT_S,
            attempt_timeout_s,
            HedgeBudget(hedge_share),
            ClientMetrics(CollectorRegistry()),
            clock=world.clock,
        ),
    }
    return Call(**(given | changes))


IDS = np.array([[0, 1], [1, 2], [2, 3], [3, 0]])
BOTH = np.ones((2, 4))


def call_to(
    connections: list[FakeConnection],
    holds_SE: np.ndarray = BOTH,
    ids_TK: np.ndarray = IDS,
    *,
    prefers_first: bool = False,
    **changes: Any,
) -> Call:
    """A call to servers that keep their experts; `prefers_first`: the others only replace the first."""
    world, view = connections[0].world, view_of(connections, holds_SE)
    if prefers_first:
        view.placement.shares_LSE[0, 1:] *= 1e-6
    return call_of(world, FakeReplicas(world, [view]), ids_TK, **changes)


def failovers(call: Call, reason: str) -> float:
    return call.metrics.failovers.labels(reason)._value.get()


def seasoned(world: World, name: str, *args: Any, **kwargs: Any) -> FakeConnection:
    """A connection whose service time is known to be 10 ms."""
    connection = FakeConnection(world, name, *args, **kwargs)
    connection.service = ServiceTimes()
    for rows in (1, 2, 4):
        for _ in range(20):
            connection.service.observe(rows, 0.01)
    return connection


def hedges(call: Call, outcome: str) -> float:
    return call.metrics.hedges.labels(outcome)._value.get()


def ended(call: Call) -> dict[str, dict[str, int]]:
    """The outcomes to report to the monitor, without zeros."""
    told = {"answered", "timed_out", "lost", "refused", "failed", "corrupt", "hedged_away"}
    return {
        server.server_id: {f.name: n for f, n in server.ListFields() if f.name in told}
        for server in call.metrics.outcomes.read()
    }
