"""Continuous batching in simulated time: by hand, and invariants."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_client.scheduler import RequestQueue, strategy
from attention_client.scheduler.admission import Admission
from attention_client.scheduler.cost import ImbalanceCost
from benchmarks.validate.continuous import EngineModel, Job, run_engine
from benchmarks.validate.engine_fit import (
    Step,
    fit_engine,
    probed_pace,
    recorded_pace,
    recorded_steps,
)
from eaas.errors import ConfigError

EXPERTS = 4
COST = ImbalanceCost(1.0, 0.5)


def job(arrival_s: float, prompt: int, output: int, hot: int = 0) -> Job:
    load_E = np.ones(EXPERTS)
    load_E[hot] = 9.0
    return Job(arrival_s, prompt, output, load_E)


def run(jobs: list[Job], model: EngineModel, name: str = "fcfs", window: int = 16) -> list[float]:
    queue = RequestQueue(
        strategy(name), EXPERTS, batch_size=model.batch_size, window_size=window, cost=COST
    )
    ends: list[float] = run_engine(jobs, Admission(queue, model.batch_size, COST), model).tolist()
    return ends


def test_two_at_a_time() -> None:
    model = EngineModel(2, 100, fixed_s=1.0, row_s=0.0, prompt_s=0.0)
    jobs = [job(0, 1, 2), job(0, 1, 1), job(0, 1, 1), job(5.5, 1, 3)]
    # The third takes the place of the second; the fourth finds nobody.
    assert run(jobs, model) == [2.0, 1.0, 2.0, 8.5]


def test_a_long_prompt_takes_what_is_left_of_each_step() -> None:
    model = EngineModel(3, 4, fixed_s=1.0, row_s=0.0, prompt_s=0.0)
    # Four tokens, then one decodes and three are left: 4 + 3 + 3.
    assert run([job(0, 4, 3), job(0, 6, 1)], model) == [3.0, 3.0]
    assert run([job(0, 9, 1), job(0, 1, 1)], model) == [3.0, 3.0]


def test_a_step_costs_what_is_in_it() -> None:
    model = EngineModel(2, 100, fixed_s=1.0, row_s=0.25, prompt_s=0.125)
    jobs = [job(0, 8, 2), job(0, 2, 3)]
    first = 1 + 10 * 0.125
    assert run(jobs, model) == [first + 1.5, first + 1.5 + 1.25]


def test_a_strategy_chooses() -> None:
    """Two at a time, of two kinds that come in blocks: unlike ones are put together."""
    model = EngineModel(2, 100, fixed_s=1.0, row_s=0.0, prompt_s=0.0)
    jobs = [job(0, 1, 1, hot=number // 4) for number in range(8)]
    ends = run(jobs, model, "greedy_variance")
    assert ends[:4] == ends[4:] == [1.0, 2.0, 3.0, 4.0]


@settings(deadline=None)
@given(
    st.sampled_from(("fcfs", "greedy_variance", "cost_bounded", "random")),
    st.lists(
        st.tuples(st.floats(0, 3), st.integers(1, 30), st.integers(1, 9), st.integers(0, 3)),
        min_size=1,
        max_size=30,
    ),
    st.integers(1, 4),
    st.integers(4, 20),
)
def test_invariants(
    name: str, drawn: list[tuple[float, int, int, int]], batch_size: int, batch_tokens: int
) -> None:
    model = EngineModel(batch_size, batch_tokens, fixed_s=0.5, row_s=0.1, prompt_s=0.01)
    arrivals = np.cumsum([gap for gap, *_ in drawn])
    jobs = [job(at, *rest) for at, (_, *rest) in zip(arrivals, drawn, strict=True)]
    ends = run(jobs, model, name)
    for each, end in zip(jobs, ends, strict=True):
        # Its own steps, and no less than its own work.
        steps = -(-each.prompt // batch_tokens) + each.output - 1
        least_s = steps * 0.5 + (each.output - 1) * 0.1 + each.prompt * 0.01
        assert end >= each.arrival_s + least_s - 1e-9
    # The engine never idles while somebody waits: all its work fits in before the last end.
    work_s = sum((each.output - 1) * 0.1 + each.prompt * 0.01 for each in jobs)
    most_steps = sum(-(-each.prompt // 4) + each.output for each in jobs)
    assert max(ends) <= jobs[-1].arrival_s + work_s + 0.5 * most_steps + 1e-9


def test_requests_that_come_hold_the_step_up_in_which_they_come() -> None:
    model = EngineModel(1, 100, fixed_s=1.0, row_s=0.0, prompt_s=0.0, came_s=0.5)
    # The second comes in the first's first step; the third just as that has become longer.
    assert run([job(0, 1, 2), job(0.5, 1, 1), job(1.4, 1, 1)], model)[0] == 3.0
    # What comes between two steps is read while nothing runs.
    assert run([job(0, 1, 1), job(5, 1, 1)], model) == [1.0, 6.0]


def test_an_engine_is_fitted() -> None:
    rng = np.random.default_rng(1)
    steps = [
        (rows, tokens, came, 0.004 + 0.0005 * rows + 0.00002 * tokens + 0.003 * came, 0.1 * number)
        for number, (rows, tokens, came) in enumerate(rng.integers(0, 40, (60, 3)).tolist())
    ]
    assert fit_engine(steps) == pytest.approx((0.004, 0.0005, 0.00002, 0.003))
    # Where more rows take less time, that was chance.
    falling = [(rows, 0, 0, 0.01 - 0.0001 * rows, 0.1 * rows) for rows in range(30)]
    fixed_s, *others = fit_engine(falling)
    assert others == [0, 0, 0]
    assert fixed_s == pytest.approx(np.mean([step[3] for step in falling]))
    with pytest.raises(ConfigError, match="3 recorded steps"):
        fit_engine(steps[:3])


SLOW = [{"at": 0.05 * number, "probe": 0.001 if number < 200 else 0.003} for number in range(400)]


def test_a_slow_machine_is_no_slow_engine() -> None:
    """Half of the steps and probes take three times as long: one engine is fitted."""
    fast = [(number % 4, 0, 0, 2.0 + number % 4, 0.5 * number) for number in range(18)]
    slow = [(rows, 0, 0, 3 * seconds, 30 + at_s) for rows, *_, seconds, at_s in fast]
    pace = probed_pace(SLOW)
    fixed_s, row_s, *_ = fit_engine([*fast, *slow], pace)
    assert (fixed_s * 0.001, row_s * 0.001) == pytest.approx((2.0, 1.0))
    with pytest.raises(ConfigError, match="2 recorded probes"):
        probed_pace(SLOW[:2])


def test_one_probe_that_was_interrupted_is_no_pace() -> None:
    hit = [{**each, "probe": 0.1} if number == 50 else each for number, each in enumerate(SLOW)]
    assert probed_pace(hit)(2.5) == 0.001
    assert [probed_pace(SLOW)(at_s) for at_s in (-1, 3, 15, 99)] == [0.001, 0.001, 0.003, 0.003]


def test_a_machine_that_is_slow_for_a_while() -> None:
    """The second half of the steps takes three times as long; a simulation at that pace is right again."""
    fit = (1.0, 0.0, 0.0, 0.0)
    jobs = [job(0, 1, 32), job(40, 1, 32)]
    truth = EngineModel(1, 10, *fit, pace=lambda now: 1.0 if now < 16 else 3.0)
    steps: list[Step] = []
    now = 0.0
    while now < 160:
        end_s = truth.end_s(1, 0, now)
        steps.append((1, 0, 0, end_s - now, end_s))
        now = end_s
    pace = recorded_pace(steps, fit)
    assert run(jobs, EngineModel(1, 10, *fit, pace=pace)) == run(jobs, truth) == [64.0, 160.0]


def test_steps_of_a_recording() -> None:
    events = [
        {"at": 0.0, "add": 1},
        {"at": 1.0, "step": [3, 4], "seconds": 0.5},
        {"at": 1.0, "probe": 0.1},
        {"at": 1.004, "add": 2},
        {"at": 1.008, "add": 3},  # a little after the one before
        {"at": 1.5, "step": [4, 0], "seconds": 0.49},
        {"at": 9.0, "add": 4},  # nothing ran
    ]
    # The second and the third came in the first step, and the engine saw them after that.
    assert recorded_steps(events) == [(3, 4, 2, 0.5, 1.0), (4, 0, 0, 0.49, 1.5)]
