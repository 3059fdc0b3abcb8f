"""Ejection of servers from layer calls, and their return."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from layer_world import (
    BOTH,
    IDS,
    FakeConnection,
    FakeReplicas,
    World,
    call_of,
    expected_of,
    view_of,
)


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
