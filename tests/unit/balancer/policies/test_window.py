"""Means over parts of a window of loads."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.policies.fractional.window import BLOCKS, MEANS, Windows, window_means

KINDS = ("uint8", "uint16", "uint32", "int32", "int64", "float32", "float64")


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
        means_TLE = window_WLE.reshape(mean_LTE.shape[1], -1, 2, 5).mean(axis=1)
        np.testing.assert_allclose(mean_LTE.swapaxes(0, 1), means_TLE, rtol=1e-5)


@pytest.mark.parametrize("iterations", [1, 3, 128, 1024])
def test_windows_hold_the_means_of_the_last_five(iterations: int) -> None:
    windows = Windows()
    for number in range(9):
        windows.add(np.full((iterations, 2, 3), number, float))
        assert windows.means_LTE.shape[1] <= MEANS
        assert (np.diff(windows.means_LTE[0, :, 0]) >= 0).all()
    assert set(windows.means_LTE[0, :, 0].tolist()) == {4.0, 5.0, 6.0, 7.0, 8.0}
    assert set(windows.blocks_NLE[:, 0, 0].tolist()) == {5.0, 6.0, 7.0, 8.0}


def test_a_window_of_another_length_begins_anew() -> None:
    windows = Windows()
    windows.add(np.ones((32, 2, 3)))
    windows.add(np.full((16, 2, 3), 2.0))
    assert set(windows.blocks_NLE.ravel().tolist()) == {2.0}
    assert set(windows.means_LTE.ravel().tolist()) == {2.0}
