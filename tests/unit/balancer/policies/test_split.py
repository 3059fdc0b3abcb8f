"""The split of a batch, compared with a linear program."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaas.minmax import levels, split
from linear_program import least_fullness


@st.composite
def placements(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Loads (B, E), shares (S, E), speeds (S)."""
    servers, experts = draw(st.integers(1, 8)), draw(st.integers(1, 20))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    holds_SE = rng.random((servers, experts)) < draw(st.floats(0.0, 0.7))
    holds_SE[rng.integers(servers, size=experts), np.arange(experts)] = True
    shares_SE = np.where(holds_SE, rng.random((servers, experts)) + 0.01, 0.0)
    load_BE = rng.lognormal(0, draw(st.floats(0, 3)), (3, experts))
    load_BE[rng.random(load_BE.shape) < draw(st.floats(0, 1))] = 0
    speeds_S = rng.uniform(0.2, 5, servers) if draw(st.booleans()) else np.ones(servers)
    return load_BE, shares_SE, speeds_S


@given(placements(), st.booleans())
def test_no_split_is_better_says_the_linear_program(drawn, with_backlog: bool) -> None:
    load_BE, shares_SE, speeds_S = drawn
    rng = np.random.default_rng(0)
    backlog_S = rng.uniform(0, 4, len(speeds_S)) * (rng.random(len(speeds_S)) < 0.5) * with_backlog
    given_ = (load_BE[0], shares_SE, speeds_S, backlog_S if with_backlog else None)
    before = load_BE.copy(), shares_SE.copy()
    out_SE = split(*given_)
    assert (split(*given_) == out_SE).all()
    assert (load_BE == before[0]).all()
    assert (shares_SE == before[1]).all()
    assert ((out_SE > 0) <= (shares_SE > 0)).all()
    assert (out_SE >= 0).all()
    np.testing.assert_allclose(out_SE.sum(axis=0), 1)
    full_S = (out_SE @ load_BE[0] + backlog_S) / speeds_S
    best = least_fullness(load_BE[0], shares_SE > 0, speeds_S, backlog_S)
    assert full_S.max() <= best * (1 + 1e-6) + 1e-9


@given(placements())
def test_levels_are_what_the_splits_come_to(drawn) -> None:
    load_BE, shares_SE, speeds_S = drawn
    level_B = levels(load_BE, shares_SE, speeds_S)
    for load_E, level in zip(load_BE, level_B, strict=True):
        full_S = (split(load_E, shares_SE, speeds_S) @ load_E) / speeds_S
        assert full_S.max() == pytest.approx(level, rel=1e-6, abs=1e-9)


def test_experts_without_load_keep_the_shares_of_the_plan() -> None:
    shares_SE = np.array([[0.25, 1.0], [0.75, 0.0]])
    np.testing.assert_allclose(split([0, 4], shares_SE), shares_SE)


def test_a_backlog_is_worked_around_and_the_rest_is_levelled() -> None:
    # The first server is late whatever is done; the other two share.
    shares_SE = np.full((3, 6), 1 / 3)
    out_SE = split(np.ones(6), shares_SE, None, [100.0, 0.0, 0.0])
    work_S = out_SE.sum(axis=1)
    assert work_S[0] == pytest.approx(0, abs=1e-9)
    assert work_S[1] == pytest.approx(work_S[2], rel=0.02)


def test_experts_without_a_server_are_left_out() -> None:
    out_SE = split([5.0, 5.0], [[1.0, 0.0], [1.0, 0.0]])
    np.testing.assert_allclose(out_SE, [[0.5, 0], [0.5, 0]])


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (([1.0], [[1.0, 1.0]]), "load_E"),
        (([-1.0, 1.0], [[1.0, 1.0]]), "load"),
        (([np.nan, 1.0], [[1.0, 1.0]]), "load"),
        (([1.0, 1.0], [[np.inf, 1.0]]), "shares"),
        (([1.0, 1.0], [1.0, 1.0]), "shares_SE"),
        (([1.0, 1.0], [[1.0, 1.0]], [0.0]), "speeds"),
        (([1.0, 1.0], [[1.0, 1.0]], [1.0, 1.0]), "speeds_S"),
        (([1.0, 1.0], [[1.0, 1.0]], [1.0], [-1.0]), "backlog"),
    ],
)
def test_wrong_arguments_are_named(arguments, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        split(*arguments)
