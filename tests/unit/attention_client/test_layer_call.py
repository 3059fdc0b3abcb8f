"""LayerCall with fake connections and a fake clock."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_client.connections.messages import Ticket
from attention_client.layer_call.shared import ClusterView
from eaas.errors import (
    ExpertsUnavailableError,
    WrongRequestError,
)
from eaas.spares import SpareReplicas
from layer_world import (
    FAULTS,
    HIDDEN,
    IDS,
    TIMEOUT_S,
    Call,
    FakeConnection,
    FakeReplicas,
    World,
    call_of,
    call_to,
    ended,
    failovers,
    view_of,
)


def test_an_empty_batch_asks_no_server() -> None:
    world = World()
    call = call_to([FakeConnection(world, "s0", forever="lost")], np.ones((1, 4)), IDS[:0])
    assert call.run().shape == (0, HIDDEN)
    assert not world.asked


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
def test_only_failed_pairs_go_to_the_other_replica(fault: str, counted: str) -> None:
    world = World()
    bad, good = FakeConnection(world, "s0", (fault,)), FakeConnection(world, "s1")
    # Experts 0 and 1 on both, 2 and 3 on the good one alone.
    holds_SE = np.array([[1, 1, 0, 0], [1, 1, 1, 1]])
    call = call_to([bad, good], holds_SE, prefers_first=True)
    call.check()
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
    call = call_to([only], np.ones((1, 4)))
    call.check()
    assert world.asked == ["s0"] * 3


def test_a_wrong_request_is_not_sent_again() -> None:
    world = World()
    connections = [FakeConnection(world, f"s{i}", ("invalid",)) for i in range(2)]
    call = call_to(connections, ids_TK=IDS[:1, :1] * 0)
    with pytest.raises(WrongRequestError, match="s0"):
        call.run()
    assert world.asked == ["s0"]


@pytest.mark.parametrize(("other", "asked"), [("ok", {"s1"}), ("lost", {"s0", "s1"})])
def test_a_server_that_owes_an_answer_is_the_last_resort(other: str, asked: set[str]) -> None:
    world = World()
    stuck, good = FakeConnection(world, "s0", owes=True), FakeConnection(world, "s1", (other,))
    call_to([stuck, good]).check()
    assert (world.asked[0], set(world.asked)) == ("s1", asked)


@pytest.mark.parametrize("fault", [f for f in FAULTS if f != "invalid"])
def test_the_deadline_holds_and_the_error_names_layer_and_experts(fault: str) -> None:
    world = World()
    bad, good = FakeConnection(world, "s0", forever=fault), FakeConnection(world, "s1")
    holds_SE = np.array([[1, 0, 0, 1], [0, 1, 1, 0]])
    call = call_to([bad, good], holds_SE)
    started = world.now
    with pytest.raises(ExpertsUnavailableError) as error:
        call.run()
    assert (error.value.layer, error.value.experts) == (0, (0, 3))
    assert world.now - started == pytest.approx(TIMEOUT_S, abs=0.01)
    assert len(world.asked) < 2000  # Retries are paced, although refusals come at once.
    assert not bad.open


def test_the_only_replica_may_be_slower_than_ever_before() -> None:
    world = World()
    slow = FakeConnection(world, "s0", delay_s=1.0)  # Learned: 1 ms.
    call = call_to([slow], np.ones((1, 4)))
    call.check()


def test_a_new_placement_ends_the_wait() -> None:
    world = World()
    old, new = FakeConnection(world, "s0", forever="stale"), FakeConnection(world, "s1")
    views = [
        view_of([old, None], np.array([[1, 1, 1, 1], [0, 0, 0, 0]])),
        view_of([old, new], np.array([[0, 0, 0, 0], [1, 1, 1, 1]]), epoch=2),
    ]
    call = call_of(world, FakeReplicas(world, views, change_s=0.5), IDS)
    call.check()
    assert world.now == pytest.approx(100.51, abs=0.02)
    assert new.epochs == [2]


def test_a_spare_replica_that_is_gone_costs_one_answer() -> None:
    """s1 has expert 0 in a spare slot only; the placement has it on s0."""
    world = World()
    base, spare = FakeConnection(world, "s0"), FakeConnection(world, "s1", forever="stale")
    plain = view_of([base, spare], np.array([[1, 1, 1, 1], [0, 0, 0, 0]]))
    held = {"s1": frozenset({(0, 0)}), "left": frozenset({(0, 1)})}
    view = replace(plain, spares=SpareReplicas(1, held), _all_replicas=[])
    stale: list[tuple[str, SpareReplicas]] = []
    source = FakeReplicas(world, [view])

    def drop(server: str, spares: SpareReplicas) -> None:
        stale.append((server, spares))
        source.views[:] = [plain]

    call = call_of(world, source, np.zeros((64, 1), np.int64))
    call.shared = replace(call.shared, on_stale=drop)
    call.check()
    assert stale == [("s1", view.spares)]
    assert world.asked.count("s1") == 1


def test_a_server_without_a_spare_replica_is_asked_for_its_other_experts_at_once() -> None:
    """s1 is the only one with expert 1, and has lost expert 0 from its spare slot."""
    world = World()
    base, spare = FakeConnection(world, "s0"), FakeConnection(world, "s1", ("stale",))
    plain = view_of([base, spare], np.array([[1, 0, 1, 1], [0, 1, 0, 0]]))
    spares = SpareReplicas(1, {"s1": frozenset({(0, 0)})})
    source = FakeReplicas(world, [replace(plain, spares=spares, _all_replicas=[])])
    call = call_of(world, source, np.array([[0, 1]] * 64))
    call.shared = replace(
        call.shared, on_stale=lambda _server, _spares: source.views.__setitem__(0, plain)
    )
    began = world.now
    call.check()
    assert world.asked.count("s1") == 2
    # Two answers of 10 ms, and no pause.
    assert world.now - began == pytest.approx(0.02, abs=0.001)


def test_an_answer_next_to_a_failure_teaches_no_wrong_time() -> None:
    world = World()
    stuck, good = FakeConnection(world, "s0", ("silent",)), FakeConnection(world, "s1")
    holds_SE = np.array([[1, 1, 0, 0], [1, 1, 1, 1]])
    before = good.service.budget(4, 0.0, 10.0)
    call = call_to([stuck, good], holds_SE, attempt_timeout_s=1.5)
    call.check()
    assert good.service.budget(4, 0.0, 10.0) < before + 6 * 0.02


def test_an_interrupt_abandons_requests_in_flight() -> None:
    class Interrupted(FakeConnection):
        def wait(self, ticket: Ticket, seen_seq: int, timeout_s: float) -> None:
            raise KeyboardInterrupt

    world = World()
    connections = [Interrupted(world, f"s{i}") for i in range(2)]
    call = call_to(connections)
    with pytest.raises(KeyboardInterrupt):
        call.run()
    assert sum(c.abandoned for c in connections) == 2


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
    wanted_T = rng.random(len(ids_TK)) < 0.8
    policy = draw(st.sampled_from(("least_loaded", "weights")))
    for connection in connections:
        for _ in range(draw(st.sampled_from((0, 30)))):  # From 20 on, late requests are hedged.
            connection.service.observe(1, 0.001)
    hedge_share = draw(st.sampled_from((0.0, 0.05, 1.0)))
    call = call_of(
        world, replicas, ids_TK, wanted_T=wanted_T, policy=policy, hedge_share=hedge_share
    )
    return world, call, connections


@settings(max_examples=100)
@given(worlds())
def test_any_failure_gives_the_right_sum_or_one_typed_error(drawn) -> None:
    world, call, connections = drawn
    started = world.now
    try:
        out_TH = call.run()
    except (ExpertsUnavailableError, WrongRequestError):
        pass
    else:
        assert torch.equal(out_TH, call.expected())
    assert world.now - started <= TIMEOUT_S + 0.01
    assert not any(c.open or c.reading for c in connections)
