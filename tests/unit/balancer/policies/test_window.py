"""Means over parts of a window of loads."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancer.policies import compiled
from balancer.policies.fractional.window import BLOCKS, MEANS, History, window_means

KINDS = ("uint8", "uint16", "uint32", "int32", "int64", "float32", "float64")


@settings(deadline=None)
@given(st.integers(1, 400), st.sampled_from(KINDS), st.integers(0, 2**32))
def test_blocks_are_those_of_numpy_and_made_of_even_parts(
    iterations: int, kind: str, seed: int
) -> None:
    window_WLE = np.random.default_rng(seed).integers(0, 200, (iterations, 2, 5)).astype(kind)
    mean_LTE, block_NLE = window_means(window_WLE)
    edges = np.linspace(0, iterations, min(BLOCKS, iterations) + 1).astype(int).tolist()
    expected = [window_WLE[begin:end].mean(axis=0) for begin, end in pairwise(edges)]
    np.testing.assert_allclose(block_NLE, expected, rtol=1e-5)
    parts = mean_LTE.shape[1] // len(block_NLE)
    assert mean_LTE.shape == (2, parts * len(block_NLE), 5)
    assert parts <= 9
    if iterations % mean_LTE.shape[1] == 0:
        ours_NLE = mean_LTE.reshape(2, len(block_NLE), parts, 5).mean(axis=2).swapaxes(0, 1)
        np.testing.assert_allclose(ours_NLE, block_NLE, rtol=1e-5)


def test_blocks_cover_the_window_evenly() -> None:
    window_WLE = np.arange(100.0)[:, None, None] * np.ones((1, 2, 3))
    mean_LTE, block_NLE = window_means(window_WLE)
    assert block_NLE.shape == (BLOCKS, 2, 3)
    assert (np.diff(block_NLE[:, 0, 0]) > 0).all()
    assert (np.diff(mean_LTE[0, :, 0]) > 0).all()
    assert block_NLE.mean() == pytest.approx(49.5, rel=0.02)


@pytest.mark.parametrize("count", [1, 3, 128, 160])
def test_the_history_holds_the_last_windows_within_the_most_means(count: int) -> None:
    history = History(5)
    for number in range(9):
        mean_LTE = np.full((2, count, 3), number, np.float32)
        history.add(mean_LTE)
        assert history.joined().shape[1] <= MEANS
        assert (np.diff(history.joined()[0, :, 0]) >= 0).all()
    assert set(history.joined()[0, :, 0].tolist()) == {4.0, 5.0, 6.0, 7.0, 8.0}


def test_parts_outside_the_window_are_refused() -> None:
    window_WLE, mean_LTE = np.ones((4, 1, 2)), np.empty((1, 2, 2), np.float32)
    for edges in ([0, 2, 5], [-1, 2, 4], [0, 2, 2]):
        with pytest.raises(ValueError, match="out of range"):
            compiled.window_means["float64"](
                window_WLE, np.array(edges), mean_LTE, np.empty((2, 1, 2))
            )
