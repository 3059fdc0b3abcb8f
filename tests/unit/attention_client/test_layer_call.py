"""LayerCall against fake connections and a fake clock: no slot, no thread, no time."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from attention_client.budget import HedgeBudget, ServiceTimes
from attention_client.dispatch import dispatch_policy
from attention_client.dispatch.parts import Part
from attention_client.layer_call import ClusterView, Dispatcher, LayerCall
from attention_client.messages import Answer, LayerInput, Ticket
from attention_client.metrics import ClientMetrics
from eaas.errors import (
    ConnectionLostError,
    ExpertsUnavailableError,
    SlotCorruptError,
    SlotsBusyError,
    WrongRequestError,
)
from eaas.types import Placement
from eaas.wire import ResultHeader
from eaas.wire.slot import Status, WireDtype

HIDDEN = 4
TIMEOUT_S = 3.0
FAULTS = ("lost", "busy", "silent", "late", "stale", "internal", "corrupt", "torn", "invalid")


@dataclass
class World:
    """The clock, and everything that the fakes write down."""

    now: float = 100.0
    pairs: list[tuple[str, int, int]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def clock(self) -> float:
        return self.now


class FakeConnection:
    """Answers after a delay what the script says, request by request; "ok" once the script is over."""

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

    def submit(self, inputs: LayerInput, epoch: int, part: Part, budget_s: float) -> Ticket:
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
    """A layer call, with what it was made of."""

    x_TH: torch.Tensor
    ids_TK: np.ndarray
    scores_TK: np.ndarray
    wanted_TK: np.ndarray
    shared: Dispatcher

    def run(self) -> torch.Tensor:
        inputs = LayerInput.of(0, self.x_TH, self.scores_TK)
        return LayerCall(self.shared, inputs, self.ids_TK, self.wanted_TK).run()

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
    # The first column names the token; whole numbers, so that every order of summation is exact.
    x_TH = (torch.arange(tokens)[:, None] + torch.arange(HIDDEN) * tokens).float()
    given = {
        "x_TH": x_TH,
        "ids_TK": ids_TK,
        "scores_TK": np.ones(ids_TK.shape, dtype=np.float32),
        "wanted_TK": np.ones(ids_TK.shape, dtype=bool),
        "shared": Dispatcher(
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


def expected_of(call: Call) -> torch.Tensor:
    weight_T = ((call.ids_TK + 1) * call.scores_TK * call.wanted_TK).sum(axis=1)
    return call.x_TH * torch.from_numpy(weight_T.astype(np.float32))[:, None]


IDS = np.array([[0, 1], [1, 2], [2, 3], [3, 0]])
BOTH = np.ones((2, 4))


def failovers(call: Call, reason: str) -> float:
    return call.metrics.failovers.labels(reason)._value.get()


def ended(call: Call) -> dict[str, dict[str, int]]:
    """What the monitor is to be told, without the zeros."""
    told = {"answered", "timed_out", "lost", "refused", "failed", "corrupt", "hedged_away"}
    return {
        server.server_id: {f.name: n for f, n in server.ListFields() if f.name in told}
        for server in call.metrics.outcomes.read()
    }


def test_every_pair_is_computed_once_and_unwanted_ones_never() -> None:
    world = World()
    connections = [FakeConnection(world, f"s{i}") for i in range(2)]
    wanted_TK = np.array([[1, 1], [0, 0], [1, 0], [1, 1]], dtype=bool)
    call = call_of(
        world, FakeReplicas(world, [view_of(connections, BOTH)]), IDS, wanted_TK=wanted_TK
    )
    assert torch.equal(call.run(), expected_of(call))
    pairs = [(t, e) for _, t, e in world.pairs]
    assert sorted(pairs) == sorted((t, int(IDS[t, k])) for t, k in np.argwhere(wanted_TK))


def test_no_tokens_ask_nobody() -> None:
    world = World()
    call = call_of(world, FakeReplicas(world, [view_of([None, None], BOTH)]), IDS[:0])
    assert call.run().shape == (0, HIDDEN)


@pytest.mark.parametrize(
    ("fault", "counted"),
    [
        ("lost", "lost"),
        ("silent", "timeout"),
        ("late", "timeout"),
        ("stale", "refused"),
        ("internal", "refused"),
        ("corrupt", "corrupt"),
    ],
)
def test_only_what_failed_goes_to_the_other_replica(fault: str, counted: str) -> None:
    world = World()
    bad, good = FakeConnection(world, "s0", (fault,)), FakeConnection(world, "s1")
    # Experts 0 and 1 on both, 2 and 3 on the good one alone.
    holds_SE = np.array([[1, 1, 0, 0], [0, 0, 1, 1]])
    shares = view_of([bad, good], holds_SE)
    shares.placement.holds_LSE[0, 1, :2] = True
    shares.placement.shares_LSE[0, 1, :2] = 1e-6  # Only used where s0 is not.
    call = call_of(world, FakeReplicas(world, [shares]), IDS)
    assert torch.equal(call.run(), expected_of(call))
    assert world.asked == ["s0", "s1", "s1"]
    assert sorted((t, e) for _, t, e in world.pairs) == sorted(
        (t, int(e)) for t in range(4) for e in IDS[t]
    )
    assert failovers(call, counted) == 1
    told = {"timeout": "timed_out", "refused": "refused" if fault == "stale" else "failed"}
    assert ended(call) == {"s0": {told.get(counted, counted): 1}, "s1": {"answered": 2}}
    assert bad.abandoned == (fault in ("silent", "late"))
    assert not bad.open
    assert not good.open


def test_a_busy_server_is_asked_again() -> None:
    world = World()
    only = FakeConnection(world, "s0", ("busy", "busy"))
    call = call_of(world, FakeReplicas(world, [view_of([only], np.ones((1, 4)))]), IDS)
    assert torch.equal(call.run(), expected_of(call))
    assert world.asked == ["s0"] * 3


def test_a_wrong_request_is_not_sent_again() -> None:
    world = World()
    connections = [FakeConnection(world, f"s{i}", ("invalid",)) for i in range(2)]
    call = call_of(world, FakeReplicas(world, [view_of(connections, BOTH)]), IDS[:, :1] * 0)
    with pytest.raises(WrongRequestError, match="s0"):
        call.run()
    assert world.asked == ["s0"]


def test_a_batch_larger_than_a_slot_is_split() -> None:
    world = World()
    only = FakeConnection(world, "s0", room=3)
    ids_TK = np.tile(IDS, (4, 1))
    call = call_of(world, FakeReplicas(world, [view_of([only], np.ones((1, 4)))]), ids_TK)
    assert torch.equal(call.run(), expected_of(call))
    assert only.sizes == [3, 3, 3, 3, 3, 1]


def test_who_owes_an_answer_is_avoided_while_another_lives() -> None:
    world = World()
    stuck, good = FakeConnection(world, "s0", owes=True), FakeConnection(world, "s1")
    call = call_of(world, FakeReplicas(world, [view_of([stuck, good], BOTH)]), IDS)
    assert torch.equal(call.run(), expected_of(call))
    assert set(world.asked) == {"s1"}


def test_who_owes_an_answer_is_used_when_nobody_else_is_left() -> None:
    world = World()
    stuck, gone = FakeConnection(world, "s0", owes=True), FakeConnection(world, "s1", ("lost",))
    call = call_of(world, FakeReplicas(world, [view_of([stuck, gone], BOTH)]), IDS)
    assert torch.equal(call.run(), expected_of(call))
    assert world.asked == ["s1", "s0"]


@pytest.mark.parametrize("fault", [f for f in FAULTS if f != "invalid"])
def test_the_deadline_holds_and_the_error_names_layer_and_experts(fault: str) -> None:
    world = World()
    bad, good = FakeConnection(world, "s0", forever=fault), FakeConnection(world, "s1")
    holds_SE = np.array([[1, 0, 0, 1], [0, 1, 1, 0]])
    call = call_of(world, FakeReplicas(world, [view_of([bad, good], holds_SE)]), IDS)
    started = world.now
    with pytest.raises(ExpertsUnavailableError) as error:
        call.run()
    assert (error.value.layer, error.value.experts) == (0, (0, 3))
    assert world.now - started == pytest.approx(TIMEOUT_S, abs=0.01)
    assert len(world.asked) < 2000  # Refusals come at once; asking again has a pace.
    assert not bad.open


def test_the_only_replica_may_be_slower_than_it_ever_was() -> None:
    world = World()
    slow = FakeConnection(world, "s0", delay_s=1.0)  # Learned: 1 ms.
    call = call_of(world, FakeReplicas(world, [view_of([slow], np.ones((1, 4)))]), IDS)
    assert torch.equal(call.run(), expected_of(call))


def test_a_new_placement_ends_the_wait() -> None:
    world = World()
    old, new = FakeConnection(world, "s0", forever="stale"), FakeConnection(world, "s1")
    views = [
        view_of([old, None], np.array([[1, 1, 1, 1], [0, 0, 0, 0]])),
        view_of([old, new], np.array([[0, 0, 0, 0], [1, 1, 1, 1]]), epoch=2),
    ]
    call = call_of(world, FakeReplicas(world, views, change_s=0.5), IDS)
    assert torch.equal(call.run(), expected_of(call))
    assert world.now == pytest.approx(100.51, abs=0.02)
    assert new.epochs == [2]


def test_an_answer_found_beside_a_failure_teaches_no_wrong_time() -> None:
    world = World()
    stuck, good = FakeConnection(world, "s0", ("silent",)), FakeConnection(world, "s1")
    holds_SE = np.array([[1, 1, 0, 0], [1, 1, 1, 1]])
    view = view_of([stuck, good], holds_SE)
    before = good.service.budget(4, 0.0, 10.0)
    call = call_of(world, FakeReplicas(world, [view]), IDS, attempt_timeout_s=1.5)
    assert torch.equal(call.run(), expected_of(call))
    assert good.service.budget(4, 0.0, 10.0) < before + 6 * 0.02


def test_the_sum_does_not_depend_on_the_order_of_the_answers() -> None:
    rng = np.random.default_rng(3)
    scores_TK = rng.random(IDS.shape, dtype=np.float32)
    sums = []
    for delays in ((0.01, 0.02, 0.03), (0.03, 0.02, 0.01), (0.02, 0.03, 0.01)):
        world = World()
        connections = [FakeConnection(world, f"s{i}", delay_s=d) for i, d in enumerate(delays)]
        replicas = FakeReplicas(world, [view_of(connections, np.ones((3, 4)))])
        x_TH = torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(1))
        call = call_of(world, replicas, IDS, scores_TK=scores_TK, x_TH=x_TH)
        sums.append(call.run())
        assert len(set(world.asked)) == 3
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])


def test_nan_stays_in_its_row() -> None:
    world = World()
    connections = [FakeConnection(world, f"s{i}") for i in range(2)]
    call = call_of(world, FakeReplicas(world, [view_of(connections, BOTH)]), IDS)
    right = expected_of(call)
    call.scores_TK[2, 0] = np.inf
    call.scores_TK[2, 1] = np.nan
    out_TH = call.run()
    assert torch.equal(out_TH[[0, 1, 3]], right[[0, 1, 3]])
    assert not out_TH[2].isfinite().any()


def test_an_interrupt_abandons_what_is_in_flight() -> None:
    class Interrupted(FakeConnection):
        def wait(self, ticket: Ticket, seen_seq: int, timeout_s: float) -> None:
            raise KeyboardInterrupt

    world = World()
    connections = [Interrupted(world, f"s{i}") for i in range(2)]
    call = call_of(world, FakeReplicas(world, [view_of(connections, BOTH)]), IDS)
    with pytest.raises(KeyboardInterrupt):
        call.run()
    assert sum(c.abandoned for c in connections) == 2


def seasoned(world: World, name: str, *args: Any, **kwargs: Any) -> FakeConnection:
    """A server of which is known that it answers in 10 ms."""
    connection = FakeConnection(world, name, *args, **kwargs)
    connection.service = ServiceTimes()
    for rows in (1, 2, 4):
        for _ in range(20):
            connection.service.observe(rows, 0.01)
    return connection


def hedges(call: Call, outcome: str) -> float:
    return call.metrics.hedges.labels(outcome)._value.get()


def test_a_late_request_is_hedged_and_the_first_answer_wins() -> None:
    world = World()
    slow, fast = seasoned(world, "s0", delay_s=0.09), seasoned(world, "s1")
    view = view_of([slow, fast], BOTH)
    call = call_of(world, FakeReplicas(world, [view]), IDS[:1, :1], hedge_share=1.0)
    assert torch.equal(call.run(), expected_of(call))
    assert world.asked == ["s0", "s1"]
    assert world.now == pytest.approx(
        100.02, abs=0.002
    )  # Hedged after 10 ms, answered 10 ms later.
    assert (hedges(call, "won"), hedges(call, "lost")) == (1, 0)
    assert ended(call) == {"s0": {"hedged_away": 1}, "s1": {"answered": 1}}
    assert slow.abandoned == 1


def test_a_hedge_that_comes_second_is_dropped() -> None:
    world = World()
    slow, slower = seasoned(world, "s0", delay_s=0.012), seasoned(world, "s1", delay_s=0.09)
    view = view_of([slow, slower], BOTH)
    call = call_of(world, FakeReplicas(world, [view]), IDS[:1, :1], hedge_share=1.0)
    assert torch.equal(call.run(), expected_of(call))
    assert world.asked == ["s0", "s1"]
    assert (hedges(call, "won"), hedges(call, "lost")) == (0, 1)
    assert ended(call) == {"s0": {"answered": 1}}
    assert slower.abandoned == 1


def test_a_hedge_over_several_servers_wins_when_all_of_it_is_there() -> None:
    world = World()
    slow = seasoned(world, "s0", delay_s=0.09)
    others = [seasoned(world, "s1", delay_s=0.01), seasoned(world, "s2", delay_s=0.03)]
    holds_SE = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]])
    view = view_of([slow, *others], holds_SE)
    view.placement.shares_LSE[0, 1:] *= 1e-6
    call = call_of(world, FakeReplicas(world, [view]), IDS, hedge_share=1.0, policy="weights")
    for _ in range(2):
        call.shared.hedges.earn()
    assert torch.equal(call.run(), expected_of(call))
    assert world.asked == ["s0", "s1", "s2"]
    assert world.now == pytest.approx(100.04, abs=0.002)
    assert hedges(call, "won") == 1
    assert slow.abandoned == 1


@pytest.mark.parametrize("fault", ["lost", "stale", "corrupt", "silent"])
def test_a_hedge_that_fails_leaves_the_request_as_it_was(fault: str) -> None:
    world = World()
    slow, bad = seasoned(world, "s0", delay_s=0.09), seasoned(world, "s1", (fault,))
    view = view_of([slow, bad], BOTH)
    call = call_of(world, FakeReplicas(world, [view]), IDS[:1, :1], hedge_share=1.0)
    assert torch.equal(call.run(), expected_of(call))
    assert world.asked == ["s0", "s1"]
    assert world.now == pytest.approx(100.09, abs=0.002)


@pytest.mark.parametrize("fault", ["lost", "stale", "corrupt"])
def test_a_request_that_fails_beside_its_hedge_is_not_sent_a_third_time(fault: str) -> None:
    world = World()
    bad = seasoned(world, "s0", (fault,), delay_s=0.015)
    good = seasoned(world, "s1", delay_s=0.05)
    view = view_of([bad, good], BOTH)
    call = call_of(world, FakeReplicas(world, [view]), IDS[:1, :1], hedge_share=1.0)
    assert torch.equal(call.run(), expected_of(call))
    assert world.asked == ["s0", "s1"]
    assert world.now == pytest.approx(100.06, abs=0.002)


def test_a_hedge_has_its_own_time() -> None:
    """It must not end with the request that it was sent beside."""
    world = World()
    stuck, slow = seasoned(world, "s0", forever="silent"), seasoned(world, "s1", delay_s=0.098)
    view = view_of([stuck, slow], BOTH)
    call = call_of(world, FakeReplicas(world, [view]), IDS[:1, :1], hedge_share=1.0)
    assert torch.equal(call.run(), expected_of(call))
    assert world.asked == ["s0", "s1"]
    assert world.now == pytest.approx(100.108, abs=0.002)


def test_what_only_one_server_has_is_not_hedged() -> None:
    world = World()
    slow, other = seasoned(world, "s0", delay_s=0.09), seasoned(world, "s1")
    view = view_of([slow, other], np.array([[1, 1, 1, 1], [0, 0, 1, 1]]))
    call = call_of(world, FakeReplicas(world, [view]), IDS[:1, :1], hedge_share=1.0)
    assert torch.equal(call.run(), expected_of(call))
    assert world.asked == ["s0"]
    assert hedges(call, "won") + hedges(call, "lost") == 0


class CountedBudget(HedgeBudget):
    """Counts requests and hedges."""

    requests = hedges = 0

    def earn(self) -> None:
        self.requests += 1
        super().earn()

    def spend(self, requests: int) -> bool:
        spent = super().spend(requests)
        self.hedges += requests if spent else 0
        return spent

    def give_back(self, requests: int) -> None:
        self.hedges -= requests
        super().give_back(requests)


@pytest.mark.parametrize("outcome", ["ok", "busy"])
def test_hedges_stay_within_their_share_of_the_requests(outcome: str) -> None:
    world = World()
    servers = [seasoned(world, f"s{i}", delay_s=0.05) for i in range(3)]
    call = call_of(world, FakeReplicas(world, [view_of(servers, np.ones((3, 4)))]), IDS)
    budget = CountedBudget(0.05)
    call.shared = replace(call.shared, hedges=budget)
    for number in range(200):
        for server in servers:  # Every call is a late one, however often they are.
            server.service = seasoned(world, "").service
            if number % 3 == 0:
                server.script.extend(("ok", outcome))
        assert torch.equal(call.run(), expected_of(call))
    sent = sum(len(server.sizes) for server in servers)
    assert budget.hedges > 0
    assert budget.hedges <= 0.05 * budget.requests
    assert sent == budget.requests + budget.hedges


def test_a_server_that_keeps_failing_is_left_out_for_a_while() -> None:
    world = World()
    bad, good = FakeConnection(world, "s0", forever="internal"), FakeConnection(world, "s1")
    call = call_of(world, FakeReplicas(world, [view_of([bad, good], BOTH)]), IDS)
    for _ in range(20):
        assert torch.equal(call.run(), expected_of(call))
    asked = world.asked.count("s0")
    assert asked == call.shared.ejections.FAILURES
    world.now += 10
    call.run()
    assert world.asked.count("s0") == asked + 1


@pytest.mark.parametrize("fault", ["stale", "lost"])
def test_who_is_gone_or_was_never_meant_is_not_blamed(fault: str) -> None:
    world = World()
    bad, good = FakeConnection(world, "s0", forever=fault), FakeConnection(world, "s1")
    call = call_of(world, FakeReplicas(world, [view_of([bad, good], BOTH)]), IDS)
    for _ in range(10):
        bad.lost_reason = None
        assert torch.equal(call.run(), expected_of(call))
    assert not call.shared.ejections.out("s0", world.now)


def test_parts_that_fail_together_are_one_failure() -> None:
    world = World()
    stuck = FakeConnection(world, "s0", ("silent",) * 8, room=1)
    good = FakeConnection(world, "s1")
    ids_TK = np.zeros((8, 1), dtype=np.int64)
    view = view_of([stuck, good], BOTH)
    view.placement.shares_LSE[0, 1] *= 1e-6
    call = call_of(world, FakeReplicas(world, [view]), ids_TK, policy="weights")
    assert torch.equal(call.run(), expected_of(call))
    assert world.asked.count("s0") == 8
    assert not call.shared.ejections.out("s0", world.now)


def test_a_slow_server_that_healed_is_asked_again() -> None:
    world = World()
    servers = [FakeConnection(world, f"s{i}", delay_s=0.01) for i in range(3)]
    servers[0].delay_s = 0.1
    call = call_of(world, FakeReplicas(world, [view_of(servers, np.ones((3, 4)))]), IDS,
                   policy="round_robin", attempt_timeout_s=1.0)  # fmt: skip
    while not call.shared.ejections.out("s0", world.now):
        assert torch.equal(call.run(), expected_of(call))
        assert world.now < 110
    servers[0].delay_s = 0.01
    world.now += 6
    world.asked.clear()
    for _ in range(30):
        assert torch.equal(call.run(), expected_of(call))
        assert not call.shared.ejections.out("s0", world.now)
    assert world.asked.count("s0") >= 10


def test_a_call_that_lost_several_races_blames_once() -> None:
    world = World()
    slow = seasoned(world, "s0", delay_s=0.09, room=1)
    fast = seasoned(world, "s1")
    view = view_of([slow, fast], BOTH)
    view.placement.shares_LSE[0, 1] *= 1e-6
    ids_TK = np.zeros((4, 1), dtype=np.int64)
    call = call_of(world, FakeReplicas(world, [view]), ids_TK, hedge_share=1.0, policy="weights")
    assert torch.equal(call.run(), expected_of(call))
    assert hedges(call, "won") == 4
    assert not call.shared.ejections.out("s0", world.now)


def test_an_ejected_server_is_asked_before_one_that_hangs() -> None:
    world = World()
    ejected, stuck = FakeConnection(world, "s0"), FakeConnection(world, "s1", forever="silent")
    call = call_of(world, FakeReplicas(world, [view_of([ejected, stuck], BOTH)]), IDS)
    assert call.shared.ejections.slow("s0", ("s0", "s1"), world.now)
    started = world.now
    assert torch.equal(call.run(), expected_of(call))
    assert world.asked == ["s1", "s0"]
    assert world.now - started < 0.15


def test_an_error_in_the_middle_of_a_race_leaves_no_slot_in_use() -> None:
    world = World()
    stuck = seasoned(world, "s0", forever="silent")
    others = [seasoned(world, "s1"), seasoned(world, "s2", ("invalid",), delay_s=0.03)]
    view = view_of([stuck, *others], np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]]))
    view.placement.shares_LSE[0, 1:] *= 1e-6
    call = call_of(world, FakeReplicas(world, [view]), IDS, hedge_share=1.0, policy="weights")
    for _ in range(2):
        call.shared.hedges.earn()
    with pytest.raises(WrongRequestError):
        call.run()
    assert world.asked == ["s0", "s1", "s2"]
    assert not any(c.open or c.reading for c in (stuck, *others))


def test_work_moves_away_from_a_server_that_became_slow() -> None:
    world = World()
    slow, fast = FakeConnection(world, "s0", delay_s=0.04), FakeConnection(world, "s1")
    ids_TK = np.arange(16).reshape(8, 2)
    view = view_of([slow, fast], np.ones((2, 16)))
    call = call_of(world, FakeReplicas(world, [view]), ids_TK)
    for _ in range(10):
        assert torch.equal(call.run(), expected_of(call))
    world.pairs.clear()
    call.run()
    count = Counter(server for server, _, _ in world.pairs)
    assert count["s1"] > 3 * count["s0"]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, Call, list[FakeConnection]]:
    servers, experts = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    world = World()
    outcome = st.sampled_from(("ok", *FAULTS[:-1])) if draw(st.booleans()) else st.just("ok")
    if draw(st.integers(0, 9)) == 0:
        outcome = st.sampled_from(("ok", *FAULTS))
    connections = [
        FakeConnection(
            world,
            f"s{i}",
            tuple(draw(st.lists(outcome, max_size=4))),
            delay_s=draw(st.sampled_from((0.0, 0.001, 0.05, 0.3))),
            forever=draw(st.sampled_from(("ok", "ok", "silent", "stale", "busy"))),
            room=draw(st.integers(1, 8)),
            owes=draw(st.booleans()),
        )
        for i in range(servers)
    ]

    def view(epoch: int) -> ClusterView:
        holds_SE = rng.random((servers, experts)) < 0.7
        return view_of([c if rng.random() < 0.9 else None for c in connections], holds_SE, epoch)

    replicas = FakeReplicas(world, [view(1), view(2)], draw(st.sampled_from((0.2, 1.0, np.inf))))
    ids_TK = np.stack([rng.permutation(experts)[: min(3, experts)] for _ in range(7)])
    wanted_TK = rng.random(ids_TK.shape) < 0.8
    policy = draw(st.sampled_from(("least_loaded", "weights", "round_robin", "random")))
    for connection in connections:
        for _ in range(draw(st.sampled_from((0, 30)))):  # From 20 on, late requests are hedged.
            connection.service.observe(1, 0.001)
    hedge_share = draw(st.sampled_from((0.0, 0.05, 1.0)))
    call = call_of(
        world, replicas, ids_TK, wanted_TK=wanted_TK, policy=policy, hedge_share=hedge_share
    )
    return world, call, connections


@settings(max_examples=300, deadline=None)
@given(worlds())
def test_the_right_sum_or_one_typed_error_whatever_fails(drawn) -> None:
    world, call, connections = drawn
    started = world.now
    try:
        out_TH = call.run()
    except (ExpertsUnavailableError, WrongRequestError):
        pass
    else:
        assert torch.equal(out_TH, expected_of(call))
    assert world.now - started <= TIMEOUT_S + 0.01
    assert not any(c.open or c.reading for c in connections)
