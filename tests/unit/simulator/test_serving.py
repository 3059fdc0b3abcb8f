"""Requests that share servers: by hand, and in random orders."""

from __future__ import annotations

import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simulator.autoscaling.serving import Load, ServerModel, SharedServers

# 100 tokens a second at most, ten a second for each request, ten of a prompt at a time.
MODEL = ServerModel(tokens_per_s=100.0, token_s=0.1, prompt_tokens=10)


def run(group: SharedServers, seconds: float) -> Load:
    left = seconds
    while left > 0:
        step = min(left, group.next_s())
        group.advance(step)
        left -= step
    return group.take_load()


def test_no_request_and_one() -> None:
    idle = run(SharedServers(MODEL, 3), 2.0)
    assert (idle.utilization, idle.token_s, idle.capacity) == (0.0, None, 600.0)
    group = SharedServers(MODEL, 1)
    group.arrive(25, 20)
    # 25 tokens of a prompt are two steps and a half.
    assert group.next_s() == pytest.approx(0.25)
    load = run(group, 1.25)
    assert (load.computed, load.outputs) == (pytest.approx(35), pytest.approx(10))
    assert load.utilization == pytest.approx(35 / 125)
    assert load.token_s == pytest.approx(0.1)
    assert load.slowed == 0
    assert run(group, 5.0).outputs == pytest.approx(10)
    assert group.requests == 0
    assert math.isinf(group.next_s())


def test_more_than_there_is_slows_all_alike() -> None:
    group = SharedServers(MODEL, 1)
    for _ in range(20):
        group.arrive(0, 30)
    load = run(group, 3.0)
    assert load.utilization == 1.0
    assert load.token_s == pytest.approx(0.2)
    assert load.slowed == load.outputs == pytest.approx(300)
    group.servers = 2
    load = run(group, 1.5)
    assert load.token_s == pytest.approx(0.1)
    assert load.slowed == 0
    assert group.requests == 0


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(
        st.tuples(st.floats(0, 3), st.integers(0, 500), st.integers(0, 50), st.integers(1, 4)),
        max_size=40,
    )
)
def test_every_token_is_computed_once(
    arrivals: list[tuple[float, int, int, int]],
) -> None:
    """For any arrivals and servers nothing is lost, and no more than the capacity is done."""
    group = SharedServers(MODEL, 1)
    total = Load()
    for pause, prompt, output, servers in arrivals:
        load = run(group, pause)
        assert load.computed <= load.capacity * (1 + 1e-9) + 1e-6
        total.add(load)
        group.arrive(prompt, output)
        group.servers = servers
    total.add(run(group, 10_000.0))
    assert group.requests == 0
    asked = sum(prompt + output for _, prompt, output, _ in arrivals)
    assert total.computed == pytest.approx(asked, rel=1e-6, abs=1e-3)
    assert total.outputs == pytest.approx(sum(a[2] for a in arrivals), rel=1e-6, abs=1e-3)
    assert total.outputs == 0 or total.token_s >= MODEL.token_s * (1 - 1e-9)
