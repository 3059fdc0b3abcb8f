"""Traces on an autoscaled group, whose requests share the servers."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eaas.config import AutoscalerConfig
from simulator.autoscaling.replay import Outcome, run
from simulator.autoscaling.savings import (
    PAPER_SERVERS,
    busiest_tokens_per_s,
    paper_traffic,
    study,
)
from simulator.autoscaling.serving import Load, ServerModel, SharedServers
from simulator.autoscaling.traffic import Traffic

CONFIG = AutoscalerConfig(max_servers=32)
# A request takes a tenth of a server.
MODEL = ServerModel(tokens_per_s=100.0, token_s=0.1, prompt_tokens=0)


def steady(*parts: tuple[int, float]) -> Traffic:
    """This many requests at a time, for this many seconds."""
    arrivals: list[tuple[float, int]] = []
    begin = 0.0
    for requests, seconds in parts:
        arrivals += [(begin, round(seconds / MODEL.token_s))] * requests
        begin += seconds
    arrival_s, outputs = zip(*arrivals, strict=True)
    prompts = np.zeros(len(arrivals), dtype=np.int64)
    return Traffic("steady", np.array(arrival_s), prompts, np.array(outputs), begin)


def autoscaled(traffic: Traffic, servers: int, **more: Any) -> Outcome:
    more = {"fewest": 2, "change_s": 10.0} | more
    return run(traffic, MODEL, servers, CONFIG, autoscaled=True, **more)


def test_the_group_follows_the_load() -> None:
    # The work of 12 servers, then of 3: 20 and 5 at the target.
    outcome = autoscaled(steady((120, 3600.0), (30, 3600.0)), 13)
    assert max(n for at, n in outcome.servers if at < 3600) == 20
    assert outcome.sizes[-1] == 5
    times = [at for at, _ in outcome.servers[1:]]
    # A server that comes counts from when it is asked for, one that goes until it has gone.
    assert times[0] == 15.0
    assert min(at for at, n in outcome.servers if at > 3600 and n < 20) == 3600 + 315 + 10
    numbers = outcome.sizes
    assert set(np.abs(np.diff(numbers))) == {1}
    assert np.diff(times).min() >= CONFIG.cooldown_s


def test_server_hours() -> None:
    outcome = Outcome(7200.0, [(0.0, 4), (1800.0, 5), (3600.0, 3)])
    assert outcome.server_hours == pytest.approx(0.5 * 4 + 0.5 * 5 + 1 * 3)
    assert outcome.sizes == [4, 5, 3]
    fixed = run(steady((10, 1800.0)), MODEL, 6, CONFIG, autoscaled=False)
    assert fixed.server_hours == pytest.approx(3.0)
    assert fixed.load.utilization == pytest.approx(1 / 6)


def test_a_percentile_of_waits_is_one_of_tokens() -> None:
    outcome = Outcome(1.0, [(0.0, 1)], waits=[(0.05, 90.0), (0.0, 0.0), (0.2, 9.0), (1.0, 1.0)])
    assert [outcome.token_s(share) for share in (0.5, 0.9, 0.95, 0.995)] == [0.05, 0.05, 0.2, 1.0]


def test_a_server_that_comes_computes_nothing_yet() -> None:
    # The work of 4 servers: 4 have no room left. The 5th comes after a look, and takes 300 s.
    slow = autoscaled(steady((40, 900.0)), 4, change_s=300.0)
    at_once = autoscaled(steady((40, 900.0)), 4, change_s=0.0)
    assert slow.servers[:2] == at_once.servers[:2] == [(0.0, 4), (15.0, 5)]
    assert len(slow.servers) == 4
    assert len(at_once.servers) == 4


def test_the_busiest_minute() -> None:
    # 20 tokens a second, then 70 for one minute.
    traffic = steady((2, 300.0), (7, 60.0), (1, 240.0))
    assert busiest_tokens_per_s(traffic, 0.1, 0) == pytest.approx(70.0)
    prompt = Traffic("one", np.array([0.0]), np.array([600]), np.array([0]), 120.0)
    # 60 steps of 10 tokens.
    assert busiest_tokens_per_s(prompt, 0.1, 10) == pytest.approx(10.0)
    assert busiest_tokens_per_s(prompt, 0.1, 0) == 0.0


def test_the_figure_of_the_paper() -> None:
    """EaaS, section 5.3: 5,120 of 8,192 requests take 40 of 64 servers, 37.5 % fewer."""
    found = study(
        paper_traffic(0.05, 600.0, 3600.0),
        AutoscalerConfig(max_servers=PAPER_SERVERS),
        [PAPER_SERVERS],
        start=PAPER_SERVERS,
        fewest=2,
        change_s=10.0,
        token_s=0.05,
        prompt_tokens=0,
    )
    assert found.traffic.requests == 8192
    assert found.asked == pytest.approx(8192 / 0.05)
    # The group is just large enough at target utilisation.
    full = PAPER_SERVERS * found.model.tokens_per_s * found.config.target_utilization
    assert full == pytest.approx(found.asked)
    assert {n for at, n in found.autoscaled.servers if at < 600} == {64}
    _, fixed = found.document()["groups"]
    assert fixed["saved_at_end"] == 0.375
    # The way there takes half an hour of this hour.
    assert 0.2 < fixed["saved_by_autoscaling"] < 0.3
    assert found.autoscaled.load.slowed == 0


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(st.tuples(st.floats(0, 60), st.integers(0, 400)), min_size=2, max_size=40),
    st.integers(2, 12),
    st.integers(2, 5),
    st.floats(0, 120),
)
def test_coverage_and_cooldown_always_hold(requests, servers, fewest, change_s) -> None:
    arrival_s_R = np.cumsum([pause for pause, _ in requests])
    arrival_s_R -= arrival_s_R[0]
    outputs_R = np.array([output for _, output in requests])
    traffic = Traffic(
        "any", arrival_s_R, np.zeros_like(outputs_R), outputs_R, float(arrival_s_R[-1]) + 600
    )
    servers = max(servers, fewest)
    outcome = autoscaled(traffic, servers, fewest=fewest, change_s=change_s)
    assert min(outcome.sizes) >= fewest
    assert set(np.abs(np.diff(outcome.sizes))) <= {1}
    assert outcome.server_hours >= fewest * outcome.seconds / 3600 * (1 - 1e-9)


# 100 tokens a second at most, ten a second for each request, ten of a prompt at a time.
SHARED = ServerModel(tokens_per_s=100.0, token_s=0.1, prompt_tokens=10)


def served(group: SharedServers, seconds: float) -> Load:
    left = seconds
    while left > 0:
        step = min(left, group.next_s())
        group.advance(step)
        left -= step
    return group.take_load()


def test_no_request_and_one() -> None:
    idle = served(SharedServers(SHARED, 3), 2.0)
    assert (idle.utilization, idle.token_s, idle.capacity) == (0.0, None, 600.0)
    group = SharedServers(SHARED, 1)
    group.arrive(25, 20)
    # 25 tokens of a prompt are two steps and a half.
    assert group.next_s() == pytest.approx(0.25)
    load = served(group, 1.25)
    assert (load.computed, load.outputs) == (pytest.approx(35), pytest.approx(10))
    assert load.utilization == pytest.approx(35 / 125)
    assert load.token_s == pytest.approx(0.1)
    assert load.slowed == 0
    assert served(group, 5.0).outputs == pytest.approx(10)
    assert group.requests == 0
    assert math.isinf(group.next_s())


def test_more_than_there_is_slows_all_alike() -> None:
    group = SharedServers(SHARED, 1)
    for _ in range(20):
        group.arrive(0, 30)
    load = served(group, 3.0)
    assert load.utilization == 1.0
    assert load.token_s == pytest.approx(0.2)
    assert load.slowed == load.outputs == pytest.approx(300)
    group.servers = 2
    load = served(group, 1.5)
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
def test_every_token_is_computed_once(arrivals) -> None:
    """For any arrivals and servers nothing is lost, and no more than the capacity is done."""
    group = SharedServers(SHARED, 1)
    total = Load()
    for pause, prompt, output, servers in arrivals:
        load = served(group, pause)
        assert load.computed <= load.capacity * (1 + 1e-9) + 1e-6
        total.add(load)
        group.arrive(prompt, output)
        group.servers = servers
    total.add(served(group, 10_000.0))
    assert group.requests == 0
    asked = sum(prompt + output for _, prompt, output, _ in arrivals)
    assert total.computed == pytest.approx(asked, rel=1e-6, abs=1e-3)
    assert total.outputs == pytest.approx(sum(a[2] for a in arrivals), rel=1e-6, abs=1e-3)
    assert total.outputs == 0 or total.token_s >= SHARED.token_s * (1 - 1e-9)
