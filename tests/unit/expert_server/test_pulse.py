"""A loop that does not move is found out, a long batch is not taken for that."""

from __future__ import annotations

import threading
import time

from expert_server.pulse import Pulse, Watchdog

PATIENCE_S, MOST_S = 1.6, 10.0


class World:
    """A watchdog that looks when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pulse = Pulse(self.now)
        self.changes: list[float] = []
        self.watchdog = Watchdog(
            self.pulse, lambda: self.changes.append(self.watchdog.stalled_s), lambda: self.now
        )

    def look_for(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            self.watchdog.look()

    def batch(self, tokens: int, seconds: float) -> None:
        self.pulse.begins(tokens, self.now)
        self.pulse.ended(tokens, seconds)
        self.pulse.turns(self.now)


def test_a_loop_that_turns_has_not_stalled() -> None:
    world = World()
    for _ in range(100):
        world.pulse.turns(world.now)
        world.look_for(0.5)
    assert world.changes == []


def test_sleep_is_no_standstill() -> None:
    world = World()
    world.pulse.turns(world.now + 5.0)
    world.look_for(5.0 + PATIENCE_S - 0.15)
    assert world.changes == []
    world.look_for(0.4)
    assert len(world.changes) == 1


def test_a_batch_that_does_not_end_is_found_out_and_its_end_too() -> None:
    world = World()
    world.batch(4, 0.002)
    world.pulse.begins(4, world.now)
    world.look_for(PATIENCE_S - 0.15)
    assert world.changes == []
    world.look_for(0.3)
    assert PATIENCE_S <= world.changes[0] < PATIENCE_S + 0.2
    world.look_for(5.0)
    assert world.watchdog.stalled_s > 5.0
    world.pulse.turns(world.now)
    world.look_for(0.1)
    assert world.changes[1:] == [0.0]


def test_a_prompt_may_take_as_long_as_its_tokens_did_before() -> None:
    world = World()
    # Decoding, 5 ms a token: 200 tokens take a second at most, and may take four.
    for _ in range(50):
        world.batch(1, 0.005)
    world.pulse.begins(200, world.now)
    world.look_for(3.9)
    assert world.changes == []
    world.look_for(0.3)
    assert len(world.changes) == 1


def test_nobody_waits_for_longer_than_the_longest() -> None:
    world = World()
    world.batch(1, 1.0)
    world.pulse.begins(4096, world.now)
    world.look_for(MOST_S - 0.15)
    assert world.changes == []
    world.look_for(0.3)
    assert len(world.changes) == 1


def test_the_first_batch_gets_the_longest_time() -> None:
    world = World()
    world.pulse.begins(1, world.now)
    world.look_for(MOST_S - 0.15)
    assert world.changes == []
    world.look_for(0.3)
    assert len(world.changes) == 1


def test_one_slow_batch_is_forgotten() -> None:
    world = World()
    world.batch(1, 2.0)
    for _ in range(400):
        world.batch(1, 0.001)
    world.pulse.begins(1, world.now)
    world.look_for(PATIENCE_S + 0.2)
    assert len(world.changes) == 1


def test_a_process_that_was_stopped_does_not_take_that_for_a_standstill() -> None:
    world = World()
    world.batch(1, 0.001)
    world.watchdog.look()
    world.now += 30.0
    world.watchdog.look()
    world.look_for(PATIENCE_S - 0.15)
    assert world.changes == []
    world.look_for(0.3)
    assert len(world.changes) == 1


def test_it_looks_by_itself_and_ends() -> None:
    pulse = Pulse(time.monotonic())
    stalled = threading.Event()
    watchdog = Watchdog(pulse, stalled.set)
    pulse.ended(1, 0.001)
    watchdog.start()
    try:
        assert stalled.wait(30)
    finally:
        watchdog.close()
    watchdog.close()
    assert watchdog.stalled_s >= PATIENCE_S


def test_the_loop_notes_its_batches(bench) -> None:
    stalled: list[bool] = []
    bench.kernel.meanwhile = lambda: stalled.append(
        bench.loop.pulse.stalled_s(bench.now + 2.0, 0.0) > 0
    )
    grant = bench.grant("a")
    for _ in range(3):
        slot = bench.write(grant, 3)
        bench.step()
        bench.take(grant, slot)
    # Of the first nothing was known; the others would be overdue.
    assert stalled == [False, True, True]
