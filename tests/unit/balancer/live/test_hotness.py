"""Tokens are counted once, despite lost, late or repeated answers and restarts."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from balancer.live.hotness import HotnessFold, Reading, Step, Window, Work

L, E = 2, 3


class Server:
    """A server's counters."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.boot_id = rng.randrange(1, 1 << 60)
        self.tokens_LE = np.zeros((L, E), np.int64)
        self.sequence = 0

    def compute(self) -> None:
        self.tokens_LE[self.rng.randrange(L), self.rng.randrange(E)] += self.rng.randrange(1, 9)
        self.sequence += 1

    def answer(self, position: tuple[int, int]) -> Reading:
        known = position == (self.boot_id, self.sequence)
        tokens_LE = None if known else self.tokens_LE.copy()
        work = Work(busy_s=float(self.sequence), batches=self.sequence)
        return Reading(self.boot_id, self.sequence, tokens_LE, work)


@given(st.integers(0, 2**32))
def test_everything_is_counted_once(seed: int) -> None:
    rng = random.Random(seed)
    fold = HotnessFold(L, E)
    server = Server(rng)
    server.compute()
    fold.step({"s": server.answer(fold.position("s"))})
    # What was before the first look is not of this window; what a dead life did not tell is lost with it.
    expected_LE = np.zeros((L, E), np.int64)
    told_LE = server.tokens_LE.copy()
    counted_LE = np.zeros((L, E), np.int64)
    late: list[Reading] = []
    for _ in range(60):
        what = rng.random()
        if what < 0.5:
            server.compute()
        elif what < 0.6:
            server, told_LE, late = Server(rng), np.zeros((L, E), np.int64), []
        elif what < 0.7:
            late.append(server.answer(fold.position("s")))
        elif what < 0.8 and late:
            reading = late.pop(rng.randrange(len(late)))
            if reading.tokens_LE is not None:
                counted_LE += fold.step({"s": reading}).tokens_LE
                new_LE = np.maximum(reading.tokens_LE - told_LE, 0)
                expected_LE += new_LE
                told_LE += new_LE
        else:
            reading = server.answer(fold.position("s"))
            for _ in range(rng.randrange(3)):
                counted_LE += fold.step({"s": reading}).tokens_LE
                expected_LE += server.tokens_LE - told_LE
                told_LE = server.tokens_LE.copy()
    assert counted_LE.tolist() == expected_LE.tolist()


def test_the_work_of_each_server() -> None:
    fold = HotnessFold(L, E)
    one_LE = np.ones((L, E), np.int64)
    before = {s: Reading(7, 1, one_LE, Work(1.0, 1, 3)) for s in ("a", "b")}
    assert not fold.step(before).tokens_LE.any()
    after = {
        "a": Reading(7, 2, 3 * one_LE, Work(1.5, 2, 5)),
        "b": Reading(7, 1, None, Work(1.0, 1, 3)),
        "odd": Reading(9, 1, np.ones((L, E + 1), np.int64), Work()),
    }
    step = fold.step(after)
    assert step.tokens_LE.tolist() == (2 * one_LE).tolist()
    assert step.work["a"] == Work(0.5, 1, 2, 2 * L * E)
    assert step.work["b"].tokens == 0
    assert step.load_L["a"].tolist() == [2 * E] * L
    assert "odd" not in step.work


def step_of(*tokens: int) -> Step:
    tokens_LE = np.array([tokens] * L, np.int64)
    return Step(tokens_LE, {"a": tokens_LE.sum(axis=1)}, {"a": Work(tokens=float(sum(tokens)))})


def test_a_window_has_the_last_steps_with_tokens() -> None:
    window = Window(3)
    assert not window.add(step_of(0, 0, 0))
    for n in range(1, 6):
        assert window.add(step_of(n, 0, 1))
    assert len(window) == 3
    assert window.tokens_WLE()[:, 0, 0].tolist() == [3, 4, 5]
    assert window.tokens_LE()[0].tolist() == [12, 0, 3]
    assert window.tokens_LE(2)[0].tolist() == [9, 0, 2]
    assert window.load_LS(["a", "b"], 2).tolist() == [[11, 0]] * L
    window.keep_last(1)
    assert window.tokens_LE()[0].tolist() == [5, 0, 1]
    assert [w.tokens for w in window.work("a")] == [6.0]
