"""What servers report: tokens are counted once, and speeds are theirs and not their load's."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.live.hotness import HotnessFold, Reading, Work
from balancer.live.speeds import Speedometer, fitted_speeds
from balancer.live.state import LoadState
from eaas.config import BalancerConfig
from eaas.types import Member, MemberState, Placement, Role

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
    fold = HotnessFold()
    server = Server(rng)
    server.compute()
    fold.step({"s": server.answer(fold.position("s"))}, (L, E))
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
                counted_LE += fold.step({"s": reading}, (L, E)).tokens_LE
                new_LE = np.maximum(reading.tokens_LE - told_LE, 0)
                expected_LE += new_LE
                told_LE += new_LE
        else:
            reading = server.answer(fold.position("s"))
            for _ in range(rng.randrange(3)):
                counted_LE += fold.step({"s": reading}, (L, E)).tokens_LE
                expected_LE += server.tokens_LE - told_LE
                told_LE = server.tokens_LE.copy()
    assert counted_LE.tolist() == expected_LE.tolist()


def test_the_work_of_each_server() -> None:
    fold = HotnessFold()
    one_LE = np.ones((L, E), np.int64)
    before = {s: Reading(7, 1, one_LE, Work(1.0, 1, 3)) for s in ("a", "b")}
    assert not fold.step(before, (L, E)).tokens_LE.any()
    after = {
        "a": Reading(7, 2, 3 * one_LE, Work(1.5, 2, 5)),
        "b": Reading(7, 1, None, Work(1.0, 1, 3)),
        "odd": Reading(9, 1, np.ones((L, E + 1), np.int64), Work()),
    }
    step = fold.step(after, (L, E))
    assert step.tokens_LE.tolist() == (2 * one_LE).tolist()
    assert step.work["a"] == Work(0.5, 1, 2, 2 * L * E)
    assert step.work["b"].tokens == 0
    assert step.load_L["a"].tolist() == [2 * E] * L
    assert "odd" not in step.work


def test_a_window_has_the_last_steps_with_tokens() -> None:
    load = LoadState(BalancerConfig(window_size=5, step_interval=8))
    member = Member("a", Role.EXPERT_SERVER, 1, "h", "a:1", MemberState.SERVING)
    holds_LSE = np.ones((L, 1, E), bool)
    placement = Placement(1, ("a",), holds_LSE, holds_LSE.astype(np.float32))
    totals_LE = np.zeros((L, E), np.int64)
    assert load.tokens_WLE() is load.observed(("a",)) is None
    # The first totals do not count; nor does a step without tokens.
    for sequence, tokens in enumerate((9, 0, 1, 2, 3, 4, 5, 6)):
        totals_LE[:, 0] += tokens
        reading = Reading(7, sequence, totals_LE.copy(), Work(float(sequence)))
        load.stepped({"a": reading}, {"a": member}, placement, 1000)
    assert load.counted == 6
    assert window(load) == [2, 3, 4, 5, 6]
    assert window(load, 2) == [5, 6]
    seen = load.observed(("a", "b"))
    assert seen is not None
    assert seen.steps == 5
    assert seen.tokens_LE.tolist() == [[20, 0, 0]] * L
    assert seen.load_LS.tolist() == [[20, 0]] * L
    load.forget_the_past()
    assert window(load) == [4, 5, 6]


def window(load: LoadState, last: int | None = None) -> list[int]:
    """The first expert's tokens by step."""
    tokens_WLE = load.tokens_WLE(last)
    assert tokens_WLE is not None
    return tokens_WLE[:, 0, 0].tolist()


# Seconds that a batch, a visit and a token cost at speed 1.
COST = (1e-3, 4e-4, 2e-5)


def steps(
    speed: float, tokens: float, rng: np.random.Generator, count: int = 40, noise: float = 0.1
) -> list[Work]:
    """A server that gets this many tokens in a step, in batches of any size."""
    found = []
    for _ in range(count):
        batches, visits = rng.integers(40, 60), rng.integers(150, 400)
        had = tokens * rng.uniform(0.5, 1.5)
        busy_s = (COST[0] * batches + COST[1] * visits + COST[2] * had) / speed
        found.append(Work(busy_s * rng.uniform(1 - noise, 1 + noise), batches, visits, had))
    return found


@given(
    seed=st.integers(0, 1000),
    slow=st.sampled_from([1.0, 0.5, 0.25]),
    hot=st.sampled_from([200.0, 2000.0, 8000.0]),
)
def test_a_slow_server_is_seen_whatever_it_has_to_do(seed: int, slow: float, hot: float) -> None:
    rng = np.random.default_rng(seed)
    work = {s: steps(1.0, 2000.0, rng) for s in ("a", "b", "c")}
    work["d"] = steps(slow, hot, rng)
    speeds = fitted_speeds(work, dict.fromkeys(work, 1.0))
    assert speeds["d"] / speeds["a"] == pytest.approx(slow, rel=0.25)
    used_S = Speedometer().read(tuple(work), work, dict.fromkeys(work, 1.0))
    assert used_S[:3].tolist() == [1.0] * 3
    assert used_S[3] == pytest.approx(slow, rel=0.3)
    if slow == 1.0:
        assert used_S[3] == 1.0, "noise is no speed"


def test_a_speed_in_use_stays_until_it_is_clearly_wrong() -> None:
    rng = np.random.default_rng(1)
    speeds, stated = Speedometer(), dict.fromkeys("abc", 1.0)

    def read(slow: float) -> float:
        work = {s: steps(1.0, 2000.0, rng, noise=0.02) for s in "ab"}
        work["c"] = steps(slow, 2000.0, rng, noise=0.02)
        return float(speeds.read(tuple("abc"), work, stated)[2])

    assert read(0.9) == 1.0
    half = read(0.5)
    assert half == pytest.approx(0.5, rel=0.1)
    assert read(0.55) == half
    assert read(0.98) == 1.0, "back to what is stated"


def test_a_short_disturbance_changes_no_speed() -> None:
    rng = np.random.default_rng(2)
    work = {s: steps(1.0, 2000.0, rng) for s in "abc"}
    work["c"][:15] = steps(0.3, 2000.0, rng, count=15)
    stated = dict.fromkeys("abc", 1.0)
    assert fitted_speeds(work, stated)["c"] < 0.7
    assert Speedometer().read(tuple("abc"), work, stated).tolist() == [1.0] * 3


def test_idle_servers_have_their_stated_speed() -> None:
    rng = np.random.default_rng(1)
    stated = {"a": 1.0, "b": 3.0, "c": 2.0}
    work = {"a": steps(1.0, 2000.0, rng), "b": steps(3.0, 2000.0, rng), "c": [Work()]}
    assert Speedometer().read(("a", "b", "c"), work, stated).tolist() == [1.0, 3.0, 2.0]
    assert fitted_speeds({"a": work["a"]}, stated) == {}, "one alone has no relative speed"
