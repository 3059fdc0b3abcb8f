"""A stalled loop is noticed; a long batch is not a stall."""

from __future__ import annotations

import threading
import time

import pytest

from expert_server.loop.liveness import Liveness, Watchdog

PATIENCE_S, MOST_S = 1.6, 10.0


class World:
    """A watchdog that checks when the test calls it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.liveness = Liveness(self.now)
        self.changes: list[float] = []
        self.watchdog = Watchdog(
            self.liveness, lambda: self.changes.append(self.watchdog.stalled_s), lambda: self.now
        )

    def look_for(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            self.watchdog.check()

    def batch(self, tokens: int, seconds: float) -> None:
        self.liveness.begins(tokens, self.now)
        self.liveness.ended(tokens, seconds)
        self.liveness.turns(self.now)


def test_a_loop_that_turns_has_not_stalled() -> None:
    world = World()
    for _ in range(100):
        world.liveness.turns(world.now)
        world.look_for(0.5)
    assert world.changes == []


def test_sleeping_is_not_a_stall() -> None:
    world = World()
    world.liveness.turns(world.now + 5.0)
    world.look_for(5.0 + PATIENCE_S - 0.15)
    assert world.changes == []
    world.look_for(0.4)
    assert len(world.changes) == 1


def test_a_stalled_batch_and_its_end_are_noticed() -> None:
    world = World()
    world.batch(4, 0.002)
    world.liveness.begins(4, world.now)
    world.look_for(PATIENCE_S - 0.15)
    assert world.changes == []
    world.look_for(0.3)
    assert PATIENCE_S <= world.changes[0] < PATIENCE_S + 0.2
    world.look_for(5.0)
    assert world.watchdog.stalled_s > 5.0
    world.liveness.turns(world.now)
    world.look_for(0.1)
    assert world.changes[1:] == [0.0]


@pytest.mark.parametrize(
    ("before", "tokens", "patience_s"),
    [
        # Decoding takes 5 ms per token: 200 tokens take at most a second, and may take four.
        ([0.005] * 50, 200, 4.0),
        ([1.0], 4096, MOST_S),
        ([], 1, MOST_S),
        # One slow batch is forgotten.
        ([2.0] + [0.001] * 400, 1, PATIENCE_S),
    ],
    ids=["grows with the tokens", "bounded", "first batch", "slow batch"],
)
def test_the_patience_with_a_batch(before: list[float], tokens: int, patience_s: float) -> None:
    world = World()
    for seconds in before:
        world.batch(1, seconds)
    world.liveness.begins(tokens, world.now)
    world.look_for(patience_s - 0.15)
    assert world.changes == []
    world.look_for(0.3)
    assert len(world.changes) == 1


def test_a_suspended_process_is_not_stalled() -> None:
    world = World()
    world.batch(1, 0.001)
    world.watchdog.check()
    world.now += 30.0
    world.watchdog.check()
    world.look_for(PATIENCE_S - 0.15)
    assert world.changes == []
    world.look_for(0.3)
    assert len(world.changes) == 1


def test_the_watchdog_thread_checks_and_ends() -> None:
    liveness = Liveness(time.monotonic())
    stalled = threading.Event()
    watchdog = Watchdog(liveness, stalled.set)
    liveness.ended(1, 0.001)
    watchdog.start()
    try:
        assert stalled.wait(30)
    finally:
        watchdog.close()
    watchdog.close()
    assert watchdog.stalled_s >= PATIENCE_S


def test_the_loop_notes_its_batches(bench) -> None:
    stalled: list[bool] = []

    def check() -> None:
        still_s, patience_s = bench.loop.liveness.still(bench.now + 2.0, 0.0)
        stalled.append(still_s >= patience_s)

    bench.kernel.on_call = check
    grant = bench.grant("a")
    for _ in range(3):
        slot = bench.write(grant, 3)
        bench.step()
        bench.take(grant, slot)
    # No cost is known for the first; the others would be overdue.
    assert stalled == [False, True, True]
