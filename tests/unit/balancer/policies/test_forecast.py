"""Means over parts of a window of loads, and forecasts of loads."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.policies.fractional.forecast import forecast, scenarios
from balancer.policies.fractional.window import BLOCKS, MEANS, Windows, window_means


def test_loads_that_stay_are_forecast_by_a_long_mean() -> None:
    rng = np.random.default_rng(1)
    usual_LE = rng.lognormal(0, 1, (2, 64))
    blocks_NLE = usual_LE * rng.uniform(0.8, 1.2, (48, 2, 64))
    said_PLE = forecast(blocks_NLE, 16, 3)
    error = np.abs(said_PLE / usual_LE - 1).mean()
    assert error < np.abs(blocks_NLE[-2:].mean(axis=0) / usual_LE - 1).mean()


def test_a_straight_drift_goes_on() -> None:
    time_N = np.arange(32.0)[:, None, None]
    slope_LE = np.random.default_rng(2).uniform(-1, 1, (2, 32))
    blocks_NLE = 100 + time_N * slope_LE
    said_PLE = forecast(blocks_NLE, 16, 2)
    np.testing.assert_allclose(said_PLE[0], 100 + (32 + 3.5) * slope_LE, rtol=1e-6)
    np.testing.assert_allclose(said_PLE[1], 100 + (32 + 11.5) * slope_LE, rtol=1e-6)


def test_after_a_jump_only_the_new_counts() -> None:
    rng = np.random.default_rng(3)
    old_LE, new_LE = rng.lognormal(0, 1, (2, 1, 64))
    blocks_NLE = np.concatenate([np.tile(old_LE, (20, 1, 1)), np.tile(new_LE, (12, 1, 1))])
    np.testing.assert_allclose(forecast(blocks_NLE, 16, 1)[0], new_LE, rtol=0.3)


def test_no_line_takes_a_load_below_nothing() -> None:
    blocks_NLE = np.linspace(100, 1, 16)[:, None, None] * np.ones((1, 1, 4))
    assert (forecast(blocks_NLE, 32, 4) > 0).all()


def test_scenarios_have_the_noise_of_iterations_around_the_forecast() -> None:
    rng = np.random.default_rng(4)
    usual_LE = rng.uniform(20, 40, (1, 400))
    window_WLE = rng.poisson(usual_LE, (160, 1, 400))
    blocks_NLE = window_means(window_WLE)[1]
    said_BLE = np.tile(2 * usual_LE, (6, 1, 1))
    loads_BLE = scenarios(window_WLE, blocks_NLE, said_BLE)
    assert loads_BLE.mean() == pytest.approx(said_BLE.mean(), rel=0.02)
    assert (loads_BLE / said_BLE).std() == pytest.approx((usual_LE**-0.5).mean(), rel=0.2)
    # Where the window says nothing, the forecast stands.
    assert (scenarios(0 * window_WLE, 0 * blocks_NLE, said_BLE) == said_BLE).all()


def test_an_expert_without_a_token_in_the_chosen_iterations_is_not_forgotten() -> None:
    """Every other iteration is empty, and the scenarios use those."""
    window_WLE = np.zeros((12, 1, 16))
    window_WLE[::2, 0] = 1000 / np.arange(1, 17) ** 1.6
    blocks_NLE = window_means(window_WLE)[1]
    said_BLE = np.tile(blocks_NLE.mean(axis=0), (6, 1, 1))
    loads_BLE = scenarios(window_WLE, blocks_NLE, said_BLE)
    np.testing.assert_allclose(loads_BLE.mean(axis=0), said_BLE.mean(axis=0))


KINDS = ("uint8", "uint16", "uint32", "int32", "int64", "float32", "float64")


@given(st.integers(1, 400), st.sampled_from(KINDS), st.integers(0, 2**32))
def test_blocks_are_those_of_numpy_and_made_of_even_parts(iterations, kind, seed) -> None:
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
