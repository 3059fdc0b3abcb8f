"""Slow and failing servers: hedges of a layer call, ejections, and the return."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from attention_client.connections.deadlines import HedgeBudget
from layer_world import (
    IDS,
    FakeConnection,
    World,
    call_to,
    ended,
    hedges,
    seasoned,
)

ANSWERS, IS_SLOW, NEVER = {"delay_s": 0.01}, {"delay_s": 0.09}, {"forever": "silent"}
ONE_PAIR = IDS[:1, :1]


@pytest.mark.parametrize(
    ("first", "second", "ms", "won", "told"),
    [
        # Hedged after 15 ms, answered 10 ms later.
        (IS_SLOW, ANSWERS, 25, True, {"s0": {"hedged_away": 1}, "s1": {"answered": 1}}),
        ({"delay_s": 0.017}, IS_SLOW, 17, False, {"s0": {"answered": 1}}),
        # It must not end with the late request's timeout.
        (NEVER, {"delay_s": 0.098}, 113, None, None),
        # A failed hedge leaves the request in flight.
        *(
            (IS_SLOW, {"script": (fault,)}, 90, None, None)
            for fault in ("lost", "stale", "corrupt")
        ),
        (IS_SLOW, NEVER, 90, None, None),
        # A hedged request that fails is not sent a third time.
        *(
            ({"script": (fault,), "delay_s": 0.015}, {"delay_s": 0.05}, 65, None, None)
            for fault in ("lost", "stale", "corrupt")
        ),
    ],
)
def test_a_late_request_is_hedged_and_the_first_answer_wins(
    first: dict[str, Any], second: dict[str, Any], ms: int, won: bool | None, told: Any
) -> None:
    world = World()
    servers = [seasoned(world, "s0", **first), seasoned(world, "s1", **second)]
    call = call_to(servers, ids_TK=ONE_PAIR, hedge_share=1.0)
    call.check()
    assert world.asked == ["s0", "s1"]
    assert world.now == pytest.approx(100 + ms / 1000, abs=0.002)
    if won is not None:
        assert (hedges(call, "won"), hedges(call, "lost")) == (won, not won)
    if told is not None:
        assert ended(call) == told
        assert servers[0 if won else 1].abandoned == 1
        # Hedges are a share of these requests.
        count = call.shared.metrics.registry.get_sample_value
        assert count("eaas_server_requests_total") == 1


def test_a_hedge_over_several_servers_wins_with_its_last_answer() -> None:
    world = World()
    servers = [seasoned(world, f"s{i}", delay_s=s) for i, s in enumerate((0.09, 0.01, 0.03))]
    holds_SE = np.array([[1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 1, 1]])
    call = call_to(servers, holds_SE, prefers_first=True, hedge_share=1.0, policy="weights")
    for _ in range(2):
        call.shared.hedges.earn()
    call.check()
    assert world.asked == ["s0", "s1", "s2"]
    assert world.now == pytest.approx(100.045, abs=0.002)
    assert hedges(call, "won") == 1
    assert servers[0].abandoned == 1


def test_a_part_with_one_replica_is_not_hedged() -> None:
    world = World()
    servers = [seasoned(world, "s0", delay_s=0.09), seasoned(world, "s1")]
    holds_SE = np.array([[1, 1, 1, 1], [0, 0, 1, 1]])
    call = call_to(servers, holds_SE, ONE_PAIR, hedge_share=1.0)
    call.check()
    assert world.asked == ["s0"]
    assert hedges(call, "won") + hedges(call, "lost") == 0


class CountedBudget(HedgeBudget):
    """Counts requests and hedges."""

    requests = hedges = 0

    def earn(self, requests: int = 1) -> None:
        self.requests += requests
        super().earn(requests)

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
    call = call_to(servers, np.ones((3, 4)))
    budget = CountedBudget(0.05)
    call.shared = replace(call.shared, hedges=budget)
    for number in range(200):
        for server in servers:  # Every call is late.
            server.service = seasoned(world, "").service
            if number % 3 == 0:
                server.script.extend(("ok", outcome))
        call.check()
    sent = sum(len(server.sizes) for server in servers)
    assert budget.hedges > 0
    assert budget.hedges <= 0.05 * budget.requests
    assert sent == budget.requests + budget.hedges


def test_several_lost_hedges_of_a_call_blame_once() -> None:
    world = World()
    slow = seasoned(world, "s0", delay_s=0.09, room=1)
    fast = seasoned(world, "s1")
    ids_TK, weights = np.zeros((4, 1), dtype=np.int64), {"policy": "weights", "hedge_share": 1.0}
    call = call_to([slow, fast], ids_TK=ids_TK, prefers_first=True, **weights)
    call.check()
    assert hedges(call, "won") == 4
    assert not call.shared.ejections.out("s0", world.now)


def test_a_server_that_keeps_failing_is_ejected_for_a_while() -> None:
    world = World()
    bad, good = FakeConnection(world, "s0", forever="internal"), FakeConnection(world, "s1")
    call = call_to([bad, good])
    for _ in range(20):
        call.check()
    asked = world.asked.count("s0")
    assert asked == call.shared.ejections.FAILURES
    world.now += 10
    call.run()
    assert world.asked.count("s0") == asked + 1


@pytest.mark.parametrize("fault", ["stale", "lost"])
def test_a_lost_server_and_a_stale_placement_are_not_blamed(fault: str) -> None:
    world = World()
    bad, good = FakeConnection(world, "s0", forever=fault), FakeConnection(world, "s1")
    call = call_to([bad, good])
    for _ in range(10):
        bad.lost_reason = None
        call.check()
    assert not call.shared.ejections.out("s0", world.now)


def test_parts_that_fail_together_count_as_one_failure() -> None:
    world = World()
    stuck = FakeConnection(world, "s0", ("silent",) * 8, room=1)
    good = FakeConnection(world, "s1")
    ids_TK = np.zeros((8, 1), dtype=np.int64)
    call = call_to([stuck, good], ids_TK=ids_TK, prefers_first=True, policy="weights")
    call.check()
    assert world.asked.count("s0") == 8
    assert not call.shared.ejections.out("s0", world.now)


def test_a_slow_server_that_healed_is_asked_again() -> None:
    world = World()
    servers = [FakeConnection(world, f"s{i}", delay_s=0.01) for i in range(3)]
    servers[0].delay_s = 0.1
    call = call_to(servers, np.ones((3, 4)), policy="weights", attempt_timeout_s=1.0)
    while not call.shared.ejections.out("s0", world.now):
        call.check()
        assert world.now < 110
    servers[0].delay_s = 0.01
    world.now += 6
    world.asked.clear()
    for _ in range(30):
        call.check()
        assert not call.shared.ejections.out("s0", world.now)
    assert world.asked.count("s0") >= 10


def test_an_ejected_server_is_asked_before_one_that_hangs() -> None:
    world = World()
    ejected, stuck = FakeConnection(world, "s0"), FakeConnection(world, "s1", forever="silent")
    call = call_to([ejected, stuck])
    assert call.shared.ejections.slow("s0", ("s0", "s1"), world.now)
    started = world.now
    call.check()
    assert world.asked == ["s1", "s0"]
    assert world.now - started < 0.15


def test_work_moves_off_a_server_that_became_slow() -> None:
    world = World()
    slow, fast = FakeConnection(world, "s0", delay_s=0.04), FakeConnection(world, "s1")
    call = call_to([slow, fast], np.ones((2, 16)), np.arange(16).reshape(8, 2))
    for _ in range(10):
        call.check()
    world.pairs.clear()
    call.run()
    count = Counter(server for server, _, _ in world.pairs)
    assert count["s1"] > 3 * count["s0"]
