"""Slow and failing servers: hedges of a layer call, ejections, and the return."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from attention_client.connections.deadlines import HedgeBudget
from layer_world import (
    BOTH,
    IDS,
    FakeConnection,
    FakeReplicas,
    World,
    call_of,
    ended,
    expected_of,
    hedges,
    seasoned,
    view_of,
)


def test_a_late_request_is_hedged_and_the_first_answer_wins() -> None:
    world = World()
    slow, fast = seasoned(world, "s0", delay_s=0.09), seasoned(world, "s1")
    view = view_of([slow, fast], BOTH)
    call = call_of(world, FakeReplicas(world, [view]), IDS[:1, :1], hedge_share=1.0)
    assert torch.equal(call.run(), expected_of(call))
    assert world.asked == ["s0", "s1"]
    # Hedged after 15 ms, answered 10 ms later.
    assert world.now == pytest.approx(100.025, abs=0.002)
    assert (hedges(call, "won"), hedges(call, "lost")) == (1, 0)
    assert ended(call) == {"s0": {"hedged_away": 1}, "s1": {"answered": 1}}
    assert slow.abandoned == 1
    # Hedges are a share of these requests.
    count = call.shared.metrics.registry.get_sample_value
    assert count("eaas_server_requests_total") == 1


def test_a_hedge_that_comes_second_is_dropped() -> None:
    world = World()
    slow, slower = seasoned(world, "s0", delay_s=0.017), seasoned(world, "s1", delay_s=0.09)
    view = view_of([slow, slower], BOTH)
    call = call_of(world, FakeReplicas(world, [view]), IDS[:1, :1], hedge_share=1.0)
    assert torch.equal(call.run(), expected_of(call))
    assert world.asked == ["s0", "s1"]
    assert (hedges(call, "won"), hedges(call, "lost")) == (0, 1)
    assert ended(call) == {"s0": {"answered": 1}}
    assert slower.abandoned == 1


def test_a_hedge_over_several_servers_wins_with_its_last_answer() -> None:
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
    assert world.now == pytest.approx(100.045, abs=0.002)
    assert hedges(call, "won") == 1
    assert slow.abandoned == 1


@pytest.mark.parametrize("fault", ["lost", "stale", "corrupt", "silent"])
def test_a_failed_hedge_leaves_the_request_in_flight(fault: str) -> None:
    world = World()
    slow, bad = seasoned(world, "s0", delay_s=0.09), seasoned(world, "s1", (fault,))
    view = view_of([slow, bad], BOTH)
    call = call_of(world, FakeReplicas(world, [view]), IDS[:1, :1], hedge_share=1.0)
    assert torch.equal(call.run(), expected_of(call))
    assert world.asked == ["s0", "s1"]
    assert world.now == pytest.approx(100.09, abs=0.002)


@pytest.mark.parametrize("fault", ["lost", "stale", "corrupt"])
def test_a_hedged_request_that_fails_is_not_sent_a_third_time(fault: str) -> None:
    world = World()
    bad = seasoned(world, "s0", (fault,), delay_s=0.015)
    good = seasoned(world, "s1", delay_s=0.05)
    view = view_of([bad, good], BOTH)
    call = call_of(world, FakeReplicas(world, [view]), IDS[:1, :1], hedge_share=1.0)
    assert torch.equal(call.run(), expected_of(call))
    assert world.asked == ["s0", "s1"]
    assert world.now == pytest.approx(100.065, abs=0.002)


def test_a_hedge_has_its_own_timeout() -> None:
    """It must not end with the late request's timeout."""
    world = World()
    stuck, slow = seasoned(world, "s0", forever="silent"), seasoned(world, "s1", delay_s=0.098)
    view = view_of([stuck, slow], BOTH)
    call = call_of(world, FakeReplicas(world, [view]), IDS[:1, :1], hedge_share=1.0)
    assert torch.equal(call.run(), expected_of(call))
    assert world.asked == ["s0", "s1"]
    assert world.now == pytest.approx(100.113, abs=0.002)


def test_a_part_with_one_replica_is_not_hedged() -> None:
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
        for server in servers:  # Every call is late.
            server.service = seasoned(world, "").service
            if number % 3 == 0:
                server.script.extend(("ok", outcome))
        assert torch.equal(call.run(), expected_of(call))
    sent = sum(len(server.sizes) for server in servers)
    assert budget.hedges > 0
    assert budget.hedges <= 0.05 * budget.requests
    assert sent == budget.requests + budget.hedges


def test_several_lost_hedges_of_a_call_blame_once() -> None:
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


def test_a_server_that_keeps_failing_is_ejected_for_a_while() -> None:
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
def test_a_lost_server_and_a_stale_placement_are_not_blamed(fault: str) -> None:
    world = World()
    bad, good = FakeConnection(world, "s0", forever=fault), FakeConnection(world, "s1")
    call = call_of(world, FakeReplicas(world, [view_of([bad, good], BOTH)]), IDS)
    for _ in range(10):
        bad.lost_reason = None
        assert torch.equal(call.run(), expected_of(call))
    assert not call.shared.ejections.out("s0", world.now)


def test_parts_that_fail_together_count_as_one_failure() -> None:
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
                   policy="weights", attempt_timeout_s=1.0)  # fmt: skip
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


def test_an_ejected_server_is_asked_before_one_that_hangs() -> None:
    world = World()
    ejected, stuck = FakeConnection(world, "s0"), FakeConnection(world, "s1", forever="silent")
    call = call_of(world, FakeReplicas(world, [view_of([ejected, stuck], BOTH)]), IDS)
    assert call.shared.ejections.slow("s0", ("s0", "s1"), world.now)
    started = world.now
    assert torch.equal(call.run(), expected_of(call))
    assert world.asked == ["s1", "s0"]
    assert world.now - started < 0.15


def test_work_moves_off_a_server_that_became_slow() -> None:
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
