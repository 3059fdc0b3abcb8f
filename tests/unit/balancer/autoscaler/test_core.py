"""The autoscaler's decisions, and the rates that it goes by."""

import itertools
import math
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from balancer.autoscaler import Autoscaler, Decision, Reading, core
from balancer.autoscaler.meters import LatencyMeter, Utilizations
from eaas.config import AutoscalerConfig
from eaas.types import Member, MemberState, Role

STEP_S = 15.0
# Between 0.51 and 0.69 nothing changes.
CONFIG = AutoscalerConfig(max_servers=64)


class World:
    """A cluster that scales at once; its servers share the work evenly."""

    def __init__(self, servers: int, fewest: int = 1, **fields: Any) -> None:
        self.config = CONFIG.model_copy(update=fields)
        self.autoscaler = Autoscaler(self.config)
        self.servers, self.fewest, self.now = servers, fewest, 0.0
        self.changes: list[tuple[float, int]] = []

    def reading(self, work: float, **fields: Any) -> Reading:
        done = min(work, float(self.servers))
        busiest = done / self.servers
        return replace(Reading(self.now, self.servers, done, 0, busiest, self.fewest), **fields)

    def look(self, work: float, **fields: Any) -> Decision:
        decision = self.autoscaler.decide(self.reading(work, **fields))
        assert abs(decision.servers - decision.before) <= 1
        if decision.servers != decision.before:
            self.autoscaler.changed(decision, self.now)
            self.changes.append((self.now, decision.servers - decision.before))
            self.servers = decision.servers
        self.now += STEP_S
        return decision

    def looks(self, work: float, seconds: float, **fields: Any) -> Decision:
        for _ in range(round(seconds / STEP_S)):
            decision = self.look(work, **fields)
        return decision


def test_it_grows_at_once_and_one_at_a_time() -> None:
    world = World(4)
    first = world.look(3.8)
    assert (first.before, first.servers, first.goal) == (4, 5, 7)
    assert str(first) == ("servers: 4 -> 5: busy 95 %, the busiest 95 %; to be busy 60 % takes 7")
    second = world.look(3.8)
    assert second.servers == 5
    assert second.reason.endswith("takes 7; waits: last change 15 s ago, cooldown 60 s")
    world.looks(3.8, 200)
    # On to the target, not only back to the edge of the band.
    assert world.servers == 7
    assert [at for at, _ in world.changes] == [0, 60, 120]


def test_coverage_overrides_the_operators_limits() -> None:
    world = World(5, fewest=3)
    decision = world.looks(0.0, 1200)
    assert world.servers == 3
    assert "but every expert's replicas need 3" in decision.reason
    short = World(2, fewest=3, max_servers=1)
    decision = short.look(0.0)
    assert (decision.servers, decision.goal) == (3, 3)


def test_the_operators_limits() -> None:
    world = World(4, min_servers=4, max_servers=5)
    assert "but min_servers is 4" in world.looks(0.0, 600).reason
    assert world.servers == 4
    assert "but max_servers is 5" in world.looks(5.0, 300).reason
    assert world.servers == 5
    # A limit that was set lower needs no window.
    assert World(9, max_servers=5).look(9.0).servers == 8
    with pytest.raises(ValueError, match="min_servers 9 is above max_servers 8"):
        Autoscaler(AutoscalerConfig(min_servers=9))


def test_unmeasured_servers_count_against_a_change() -> None:
    # Three at 90 % and one unknown: 2.7 of 4 are right as they are.
    assert World(4).look(2.7, unmeasured=1).servers == 4
    assert World(4).look(3.0, unmeasured=1).servers == 5
    # One of four that does nothing as far as is known may be all that works.
    world = World(4)
    assert world.looks(1.2, 1200, unmeasured=1).servers == 4
    # Out of the window, it is no reason any more.
    assert world.looks(1.2, 315).servers == 3
    nothing = World(4).looks(0.0, 1200, unmeasured=4)
    assert nothing.reason == "no server was measured; nothing to go by"


def test_a_change_is_waited_for_but_not_for_ever() -> None:
    world = World(4)
    joining = "expert-server-4 is JOINING"
    decision = world.looks(4.0, 300, changing=joining)
    assert (decision.servers, world.servers) == (4, 4)
    assert decision.reason.endswith(f"waits: {joining}")
    world.looks(4.0, 30, changing=joining)
    assert world.servers == 5


def test_a_server_that_never_comes_is_asked_for_again() -> None:
    autoscaler = Autoscaler(CONFIG)
    asked = []
    for now in range(0, 700, 15):
        decision = autoscaler.decide(Reading(now, 4, 3.9, 0, 1.0))
        if decision.servers != 4:
            asked.append(now)
            autoscaler.changed(decision, now)
        elif 60 <= now < 300:
            assert decision.reason.endswith("waits: 5 servers were asked for")
    assert asked == [0, 300, 600]


def test_latency_adds_servers_if_servers_are_busy() -> None:
    world = World(4, latency_target_ms=50)
    decision = world.look(2.4, token_s=0.08)
    assert decision.servers == 5
    assert decision.reason == (
        "busy 60 %, the busiest 60 %, 80 ms a token; a token takes longer than 50 ms"
    )
    idle = World(1, latency_target_ms=50).look(0.25, token_s=0.08)
    assert idle.servers == 1
    assert idle.reason.endswith("but these are mostly idle: more would not help")
    # Nor do any stay for that.
    world = World(2, latency_target_ms=50)
    world.looks(0.5, 330, token_s=0.08)
    assert world.servers == 1


def test_no_server_goes_while_latency_is_near_its_target() -> None:
    world = World(4, latency_target_ms=50)
    decision = world.looks(1.3, 900, token_s=0.045)
    assert world.servers == 4
    assert decision.reason.endswith("no fewer while a token takes longer than 42.5 ms")
    world.looks(1.3, 600, token_s=0.02)
    assert world.servers == 3


def test_a_number_that_was_late_is_not_tried_again_with_as_much_work() -> None:
    world = World(4, latency_target_ms=50)
    world.look(1.9, token_s=0.08)
    assert world.servers == 5
    decision = world.looks(1.9, 1800, token_s=0.02)
    assert world.servers == 5
    assert decision.reason.endswith("4 servers were late with the work of 1.9")
    world.looks(1.2, 600, token_s=0.02)
    assert world.servers == 2
    # After an hour it is.
    world = World(4, latency_target_ms=50)
    world.look(1.9, token_s=0.08)
    world.looks(1.9, 3600 + 120, token_s=0.02)
    assert world.servers == 4


# -- whatever is measured ---------------------------------------------------------------------------

# However slow the machine is at the moment.
anyhow = settings(suppress_health_check=[HealthCheck.too_slow])

looks = st.lists(
    st.tuples(st.floats(0, 1), st.integers(0, 3), st.none() | st.floats(0, 0.2), st.booleans()),
    min_size=1,
    max_size=80,
)
limits = st.tuples(st.integers(1, 12), st.integers(1, 12)).map(sorted)


@anyhow
@given(looks, limits, st.integers(1, 12), st.integers(1, 14), st.sampled_from([0.0, 50.0]))
def test_never_below_coverage_and_never_two_changes_in_a_cooldown(
    measured: list[tuple[float, int, float | None, bool]],
    limits: list[int],
    fewest: int,
    servers: int,
    latency_target_ms: float,
) -> None:
    world = World(
        max(servers, fewest),
        fewest,
        min_servers=limits[0],
        max_servers=limits[1],
        latency_target_ms=latency_target_ms,
    )
    for share, unmeasured, token_s, changing in measured:
        before = world.servers
        world.look(
            share * before,
            unmeasured=min(unmeasured, before),
            token_s=token_s,
            changing="expert-server-9 is JOINING" if changing else "",
        )
        assert world.servers >= fewest
        if world.servers != before and min(before, world.servers) >= world.config.min_servers:
            assert world.servers <= max(fewest, before, world.config.max_servers)
    times = [at for at, _ in world.changes]
    assert all(b - a >= CONFIG.cooldown_s for a, b in itertools.pairwise(times))


@anyhow
@given(
    st.floats(0.05, 30),
    st.lists(st.floats(0, 1), min_size=30, max_size=100),
    st.integers(1, 50),
    st.floats(0.01, 0.2),
    st.floats(0.05, 0.8),
)
def test_noise_within_the_tolerance_never_moves_it_both_ways(
    least: float, noise: list[float], servers: int, tolerance: float, target: float
) -> None:
    """Work between some amount and (1 + tolerance) times it, in any order, from any number of servers."""
    world = World(
        servers,
        target_utilization=target,
        max_servers=10_000,
        scale_in_window_s=60.0,
        cooldown_s=15.0,
    )
    with patch.object(core, "TOLERANCE", tolerance):
        for share in noise:
            work = least * (1 + tolerance * share)
            # Servers that cannot keep up would show less than there is: that is another matter.
            if work <= world.servers:
                world.look(work)
            else:
                world.servers += 1
    assert len({way for _, way in world.changes}) <= 1


@anyhow
@given(st.floats(0.1, 20), st.integers(1, 40))
def test_it_ends_at_the_target(work: float, servers: int) -> None:
    world = World(servers)
    world.looks(work, 7200)
    utilization = min(work, world.servers) / world.servers
    target, tolerance = CONFIG.target_utilization, core.TOLERANCE
    assert utilization <= target * (1 + tolerance) + 1e-6
    if world.servers > 1:
        assert work / (world.servers - 1) > target * (1 - tolerance) - 1e-6
    # And stays there.
    before = len(world.changes)
    world.looks(work, 3600)
    assert len(world.changes) == before


@anyhow
@given(looks, st.floats(0, 1), st.floats(0, 1), st.integers(1, 12))
def test_more_load_never_means_fewer_servers(history, one, other, servers) -> None:
    """Two clusters with the same past: the one that is busier now, and slower, gets no fewer servers."""
    outcomes = []
    for share in sorted((one, other)):
        world = World(servers, latency_target_ms=50)
        for past, unmeasured, token_s, _ in history:
            before = world.servers
            world.look(past * before, unmeasured=min(unmeasured, before), token_s=token_s)
        decision = world.look(share * world.servers, token_s=0.1 * share)
        outcomes.append((decision.servers, decision.goal))
    (fewer, lower), (more, higher) = outcomes
    assert fewer <= more
    assert lower <= higher


@anyhow
@given(st.floats(0.5, 5), st.lists(st.floats(0, 1), min_size=100, max_size=200))
def test_latency_does_not_make_it_flap(work: float, noise: list[float]) -> None:
    """Tokens are late with few servers and in time with more: it scales out that far, and stays."""
    world = World(math.ceil(work), latency_target_ms=50, max_servers=100)
    for share in noise:
        now = work * (1 + core.TOLERANCE * share)
        utilization = min(1.0, now / world.servers)
        world.look(now, token_s=0.01 / max(0.05, 1 - utilization))
    ways = [way for _, way in world.changes]
    assert ways == sorted(ways, reverse=True)


def server(busy_s: float, silence_s: float = 0.0, incarnation: int = 1) -> Member:
    told = {"silence_s": silence_s, "busy_s": busy_s}
    role, state = Role.EXPERT_SERVER, MemberState.SERVING
    return Member("s", role, 1, "here", "here:1", state, incarnation, **told)


def test_utilization_is_of_the_time_between_two_heartbeats() -> None:
    meter = Utilizations()
    assert meter.read([server(100.0, 0.5)], 10.0) == {}
    # 6 s of work between the heartbeats of 9.5 and 19.5.
    assert meter.read([server(106.0, 0.5)], 20.0) == {"s": pytest.approx(0.6)}
    # A long batch that ended a moment ago.
    assert meter.read([server(117.0, 0.5)], 30.0) == {"s": 1.0}
    # Another incarnation counts anew.
    assert meter.read([server(3.0, incarnation=2)], 40.0) == {}
    assert meter.read([server(5.0, incarnation=2)], 50.0) == {"s": pytest.approx(0.2)}


def test_a_monitor_that_starts_again_does_not_make_servers_busy() -> None:
    meter = Utilizations()
    meter.read([server(500.0)], 10.0)
    # It has not heard of the server yet.
    assert meter.read([server(0.0, 1.0)], 20.0) == {}
    assert meter.read([server(510.0)], 30.0) == {"s": pytest.approx(0.5)}
    # A meter that began then waits for two readings of this process.
    late = Utilizations()
    late.read([server(0.0, 1.0)], 20.0)
    assert late.read([server(510.0)], 30.0) == {}
    assert late.read([server(512.0)], 40.0) == {"s": pytest.approx(0.2)}


def test_latency_is_a_mean_over_the_clients_tokens() -> None:
    meter = LatencyMeter()
    a, b = ("a", 1), ("b", 1)
    assert meter.read({a: (10.0, 100), b: (0.0, 0)}) is None
    assert meter.read({a: (11.0, 120), b: (6.0, 60)}) == pytest.approx(7 / 80)
    # Nothing came.
    assert meter.read({a: (11.0, 120), b: (6.0, 60)}) is None
    # One does not answer; then it is back, and there is no telling when its tokens came.
    assert meter.read({a: (12.0, 130)}) == pytest.approx(0.1)
    assert meter.read({a: (13.0, 140), b: (60.0, 70)}) == pytest.approx(0.1)
    # Another incarnation.
    assert meter.read({("a", 2): (1.0, 1), b: (61.0, 80)}) == pytest.approx(0.1)
