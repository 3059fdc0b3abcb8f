"""Times of plans and redeployments: the competition's numbers."""

from __future__ import annotations

import pytest

from balancer.policies.prices import EXPERT_BYTES
from simulator.placement.score import modelled_time, score
from simulator.placement.timeline import Timeline


@pytest.mark.parametrize(
    ("seconds", "iterations"), [(0.0, 1), (0.001, 1), (0.08, 1), (0.0801, 2), (1.0, 13)]
)
def test_planning_costs_iterations(seconds: float, iterations: int) -> None:
    ready, deployed = Timeline(10, 1000).deploy(11, seconds, [3])
    assert (ready, deployed) == (11 + iterations, {3: 11 + iterations})


def test_how_often_is_planned_in_a_published_trace() -> None:
    # Their EPLB at 32 servers took 13 iterations and changed nearly all of 288 x 58 slots each time.
    for interval, transit in ((256, 312436), (1024, 82421), (4096, 16630)):
        timeline, plans = Timeline(interval, 6144), 0
        while (done := timeline.next_plan) is not None:
            timeline.deploy(done, 1.0, range(58))
            plans += 1
        assert plans == pytest.approx(transit / (288 * 58), abs=0.4)


def test_modelled_time() -> None:
    # EPLB on LmSys at 64 servers: 60 * 1.4312 + 91983 * 88080384 / 9e11.
    assert EXPERT_BYTES == 3 * 7168 * 2048 * 2
    time_s = modelled_time(1.4312, 91983)
    assert time_s == pytest.approx(85.872 + 9.00211, abs=1e-4)
    assert score(time_s / 1.1, time_s) == pytest.approx(110.0)


def test_the_trace_ends() -> None:
    timeline = Timeline(10, 14)
    assert timeline.next_plan == 11
    _, deployed = timeline.deploy(11, 0.0, [5, 6, 7, 8])
    assert deployed == {5: 12, 6: 13, 7: 14}
    assert timeline.next_plan is None
    assert Timeline(10, 11).next_plan == 11
    assert Timeline(10, 10).next_plan is None
