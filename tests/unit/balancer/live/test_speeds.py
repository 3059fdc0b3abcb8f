"""Measured speeds follow the servers' speeds, not their load."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.live.hotness import Work
from balancer.live.speeds import Speedometer, fitted_speeds

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
