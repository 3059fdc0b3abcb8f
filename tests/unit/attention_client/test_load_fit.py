"""The fit of what reading an expert's weights costs, from a client's answers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_client.dispatch.parts import LOAD_PAIRS
from attention_client.layer_call.load_fit import LoadFit
from attention_client.layer_call.server_speeds import Speeds


@pytest.mark.parametrize("load_pairs", [2.0, 8.0, 60.0])
def test_it_finds_both_constants_from_batches_of_different_sizes(load_pairs: float) -> None:
    fit, rng = LoadFit(), np.random.default_rng(1)
    for _ in range(2000):
        experts = float(rng.integers(1, 9))
        pairs = experts * float(rng.choice([1, 2, 8, 32, 128]))
        # Any unit of time; noise of a tenth, and one answer in fifty takes ten times as long.
        units = 0.7 * (experts + pairs / load_pairs) * rng.normal(1, 0.1)
        fit.observe(experts, pairs, units * (10 if rng.random() < 0.02 else 1))
    assert fit.load_pairs == pytest.approx(load_pairs, rel=0.2)


@pytest.mark.parametrize("units", [0.5, 1.0, 3.0])
def test_batches_of_one_size_leave_the_default_nearly_as_it_is(units: float) -> None:
    fit = LoadFit()
    for _ in range(2000):
        fit.observe(4.0, 8.0, units * 5.0)
    assert LOAD_PAIRS / 4 < fit.load_pairs < LOAD_PAIRS * 4


@given(
    st.lists(
        st.tuples(st.floats(-1, 300), st.floats(0, 1e5), st.floats(-1, 1e9, allow_subnormal=False)),
        max_size=40,
    )
)
def test_it_stays_in_its_range(answers: list[tuple[float, float, float]]) -> None:
    fit = LoadFit()
    for experts, pairs, units in answers:
        fit.observe(experts, pairs, units)
        assert 1.0 <= fit.load_pairs <= 512.0


def test_speeds_learn_it_from_answers() -> None:
    """Servers of different speeds; what is learnt goes to the dispatch policy with their rates."""
    speeds, rng = Speeds(), np.random.default_rng(2)
    for now in np.arange(3000) * 0.001:
        server = str(rng.integers(0, 3))
        experts, pairs_each = float(rng.integers(1, 9)), float(rng.choice([1, 4, 16, 64]))
        known = speeds.load(["0", "1", "2"], [0.0] * 3, now).load_pairs
        work = experts + experts * pairs_each / known
        seconds = (1 + int(server)) * 1e-4 * (experts + experts * pairs_each / 32)
        speeds.observe(server, work, seconds, now, pairs=experts * pairs_each)
    load = speeds.load(["0", "1", "2"], [0.0] * 3, 3.1)
    assert load.load_pairs == pytest.approx(32, rel=0.2)
    assert load.rate_S == pytest.approx([1e-4, 2e-4, 3e-4], rel=0.3)
