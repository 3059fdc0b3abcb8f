"""ScalpeLB: its parts by hand, its cycles, and the competition's entry point."""

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from balancer.policies import Layout, ScalpelBalancer, plan, rebalance
from balancer.policies.measure import peak_to_mean
from balancer.policies.problem import make_problem
from balancer.policies.scalpel import align, fresh_placement, swap_hottest
from balancer.policies.window import planning_weight, shift, variance_buffer

Float = npt.NDArray[np.float64]


def skewed(layers: int, experts: int, seed: int) -> Float:
    rng = np.random.default_rng(seed)
    return rng.permuted(np.tile(1e4 / np.arange(1, experts + 1), (layers, 1)), axis=1)


def window(load_LE: Float, steps: int, seed: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng(seed).poisson(load_LE, size=(steps, *load_LE.shape))


def par_of(load_LE: Float, holds_LSE: npt.NDArray[np.bool_]) -> Float:
    shares_LSE = holds_LSE / holds_LSE.sum(axis=1, keepdims=True)
    return peak_to_mean(np.einsum("lse,le->ls", shares_LSE, load_LE), np.ones(holds_LSE.shape[1]))


@given(hnp.arrays(np.int64, (7, 2, 5), elements=st.integers(0, 100)), st.sampled_from([0.0, 1.5]))
def test_the_weight_is_mean_and_std_or_that_of_a_ramp(window_WLE, k) -> None:
    plain_LE = window_WLE.mean(axis=0) + k * window_WLE.std(axis=0)
    np.testing.assert_allclose(planning_weight(window_WLE, k, 1.1), plain_LE, atol=1e-5)
    ramp_W = np.arange(1, 8) / 28
    mean_LE = np.einsum("w,wle->le", ramp_W, window_WLE)
    std_LE = np.sqrt(np.einsum("w,wle->le", ramp_W, (window_WLE - mean_LE) ** 2))
    found_LE = planning_weight(window_WLE, k, 0.2)
    for layer, distance in enumerate(shift(window_WLE)):
        expected = (mean_LE + k * std_LE)[layer] if distance > 0.2 else plain_LE[layer]
        np.testing.assert_allclose(found_LE[layer], expected, atol=1e-5)


def test_shift_is_total_variation_whatever_the_volume() -> None:
    window_WLE = np.array([[[8, 2, 0]], [[8, 2, 0]], [[0, 20, 80]], [[0, 10, 40]]])
    assert shift(window_WLE)[0] == pytest.approx(0.8)
    assert shift(window_WLE[:2] * [[[1]], [[7]]])[0] == 0
    # A half without load, or no half at all, says nothing.
    assert shift(window_WLE * np.array([0, 0, 1, 1])[:, None, None])[0] == 0
    assert shift(window_WLE[:1])[0] == 0


def test_variance_is_planned_for_where_experts_are_many() -> None:
    assert (variance_buffer(256), variance_buffer(192), variance_buffer(128)) == (2.0, 2.0, 0.0)


def test_a_swap_takes_the_hottest_for_the_coldest() -> None:
    # Servers with 9 + 3, 4 + 1, 5 + 2.
    holds_LSE = np.zeros((1, 3, 6), dtype=np.bool_)
    for server, experts in enumerate([(0, 1), (2, 3), (4, 5)]):
        holds_LSE[0, server, experts] = True
    load_LE = np.array([[9.0, 3.0, 4.0, 1.0, 5.0, 2.0]])
    # 9 for 1 would only turn the servers around: 4 + 9 is not below 9 + 3.
    assert (swap_hottest(Layout.of(holds_LSE), load_LE, np.ones(3), 8) == holds_LSE).all()
    load_LE[0, 0] = 5.0
    once = swap_hottest(
        Layout.of(holds_LSE), np.array([[6.0, 6.0, 1.0, 1.0, 4.0, 4.0]]), np.ones(3), 1
    )
    # One 6 for one 1.
    assert [np.flatnonzero(row).tolist() for row in once[0]] == [[1, 2], [0, 3], [4, 5]]


@given(st.integers(0, 2**32 - 1), st.integers(0, 4))
def test_swaps_keep_counts_and_lower_the_peak(seed: int, budget: int) -> None:
    first = plan("spread", np.ones((3, 12)), 5, 17)
    load_LE = skewed(3, 12, seed)
    after_LSE = swap_hottest(first.layout, load_LE, np.ones(5), budget)
    assert (after_LSE.sum(axis=1) == first.holds_LSE.sum(axis=1)).all()
    assert (after_LSE.sum(axis=2) == first.holds_LSE.sum(axis=2)).all()
    assert ((after_LSE & ~first.holds_LSE).sum(axis=(1, 2)) <= 2 * budget).all()
    assert (par_of(load_LE, after_LSE) <= par_of(load_LE, first.holds_LSE) * (1 + 1e-12)).all()


@given(st.integers(0, 2**32 - 1))
def test_alignment_permutes_packs_and_the_optimal_one_is_optimal(seed: int) -> None:
    current = plan("eplb", skewed(1, 10, seed), 4, 16)
    problem = make_problem(skewed(1, 10, seed + 1), 4, 16, current=current)
    fresh = fresh_placement(problem, problem.load_LE)
    packs_SE = fresh.layout().holds_LSE[0]
    layers = np.array([0])
    transits = {}
    for matching in ("greedy", "optimal"):
        aligned_SE = align(problem, fresh, layers, matching).layout().holds_LSE[0]  # type: ignore[arg-type]
        assert sorted(map(bytes, aligned_SE)) == sorted(map(bytes, packs_SE))
        transits[matching] = (aligned_SE & ~current.holds_LSE[0]).sum()
    best = min(
        (packs_SE[list(order)] & ~current.holds_LSE[0]).sum()
        for order in itertools.permutations(range(4))
    )
    assert transits["optimal"] == best <= transits["greedy"]


def test_packs_go_to_servers_of_their_size_only() -> None:
    slots = [6, 2, 2, 6]
    current = plan("eplb", skewed(2, 10, 0), 4, slots)
    aligned = plan("scalpel", skewed(2, 10, 1), 4, slots, current=current, anew=True)
    assert (aligned.holds_LSE.sum(axis=2) == slots).all()


def test_a_first_cycle_is_eplb_of_the_weight_then_a_stable_trace_stays() -> None:
    load_LE = skewed(4, 64, 0)
    balancer = ScalpelBalancer(8, 80)
    first = balancer.step(window(load_LE, 32, 1))
    assert first.transit == 0
    for cycle in range(3):
        seen = window(load_LE, 32, 2 + cycle)
        later = balancer.step(seen)
        fresh = plan("eplb", seen.sum(axis=0), 8, 80)
        # At most 8 swaps in a layer, and within the tolerance of a fresh placement.
        assert later.transit <= 4 * 8 * 2
        assert (later.par_L <= fresh.par_L + 0.2 + 0.05).all()
        assert balancer.plan is later


def test_only_a_drifted_layer_is_placed_anew() -> None:
    load_LE = skewed(4, 64, 0)
    first = plan("scalpel", load_LE, 8, 80)
    drifted_LE = load_LE.copy()
    drifted_LE[2] = skewed(4, 64, 99)[2]
    second = plan("scalpel", drifted_LE, 8, 80, current=first, budget=0)
    moved_L = (second.holds_LSE & ~first.holds_LSE).sum(axis=(1, 2))
    assert np.flatnonzero(moved_L).tolist() == [2]
    fresh = plan("scalpel", drifted_LE, 8, 80)
    assert second.par_L[2] == pytest.approx(fresh.par_L[2])


def test_heavy_drift_places_every_layer_anew() -> None:
    load_LE = skewed(4, 64, 0)
    first = plan("scalpel", load_LE, 8, 80)
    new_LE = skewed(4, 64, 99)
    new_LE[0] = load_LE[0] * 1.01
    new_LE[0, :2] = new_LE[0, :2].mean()
    knobs: dict[str, Any] = {"current": first, "budget": 0}
    patched = plan("scalpel", new_LE, 8, 80, heavy_frac=1.0, **knobs)
    assert (patched.holds_LSE[0] == first.holds_LSE[0]).all()
    anew = plan("scalpel", new_LE, 8, 80, heavy_frac=0.5, **knobs)
    fresh = plan("scalpel", new_LE, 8, 80)
    np.testing.assert_allclose(anew.par_L, fresh.par_L)


def test_a_regime_that_flips_in_the_window_is_planned_for_its_end() -> None:
    old_LE, new_LE = skewed(2, 64, 0), skewed(2, 64, 7)
    flip = np.concatenate([window(old_LE, 20, 1), window(new_LE, 12, 2)])
    seen_LE = flip.sum(axis=0)
    ramp = plan("scalpel", seen_LE, 8, 80, window_WLE=flip)
    plain = plan("scalpel", seen_LE, 8, 80, window_WLE=flip, shift_tv=1.1)
    assert par_of(new_LE, ramp.holds_LSE).mean() < par_of(new_LE, plain.holds_LSE).mean()


def test_an_unusable_current_layout_is_replaced() -> None:
    load_LE = skewed(2, 16, 0)
    current = plan("eplb", load_LE, 4, 20).holds_LSE.copy()
    current[0, :, 3] = False
    found = plan("scalpel", load_LE, 4, 20, current=current)
    assert found.holds_LSE.any(axis=1).all()
    smaller = plan("scalpel", load_LE, 4, 16, current=plan("eplb", load_LE, 4, 20))
    assert (smaller.holds_LSE.sum(axis=2) == 4).all()


def test_a_window_of_short_floats() -> None:
    loads = torch.tensor(window(skewed(2, 16, 0), 4, 0)).bfloat16()
    expected = rebalance(loads.double().numpy(), 4, 4, state={})
    found = rebalance(loads.requires_grad_(), 4, 4, state={})
    assert found[0]
    assert np.array_equal(found[2], expected[2])
    # The highest float16: a sum of two is beyond its range.
    high = np.full((4, 2, 16), 65504, np.float16)
    assert rebalance(high, 4, 4, state={})[0]
    assert ScalpelBalancer(4, 20).step(high).problem.load_LE.max() == 4 * 65504


def test_rebalance_keeps_its_state_and_the_slots_of_what_stays() -> None:
    state: dict[Any, Any] = {}
    load_LE = skewed(3, 32, 0)
    success, layers, before, first = rebalance(window(load_LE, 8, 0), 8, 8, state=state)
    assert success
    assert first is not None
    assert layers.tolist() == [0, 1, 2]
    assert before.shape == (3, 8, 5)
    changed = load_LE.copy()
    changed[1] = skewed(3, 32, 9)[1]
    success, layers, after, second = rebalance(window(changed, 8, 1), 8, 8, state=state)
    assert success
    assert second is not None
    moved_LSP = before != after
    assert set(np.flatnonzero(moved_LSP.any(axis=(1, 2)))) == set(layers.tolist())
    assert 1 in layers
    # Slot by slot no more than the sets of experts differ.
    assert moved_LSP.sum() == second.transit > 0
    for layer in range(3):
        for server in range(8):
            held = np.flatnonzero(second.holds_LSE[layer, server]).tolist()
            assert sorted(after[layer, server].tolist()) == held


def test_a_bad_cycle_is_survived(caplog: pytest.LogCaptureFixture) -> None:
    state: dict[Any, Any] = {}
    bad = np.full((4, 2, 16), np.nan)
    success, layers, placement, plan_ = rebalance(bad, 4, 4, state=state)
    assert (success, layers.size, plan_) == (False, 0, None)
    assert "hotness" in caplog.text
    assert placement.shape == (2, 4, 5)
    assert all(set(layer.ravel().tolist()) == set(range(16)) for layer in placement)
    good = rebalance(window(skewed(2, 16, 0), 4, 0), 4, 4, state=state)
    success, _, placement, plan_ = rebalance(-bad, 4, 4, state=state)
    assert not success
    assert plan_ is good[3]
    assert (placement == good[2]).all()


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((np.ones((2, 3)), 4, 4), "hotness has shape"),
        ((np.ones((2, 1, 16)), 0, 4), "n_device is 0"),
        ((np.ones((2, 1, 16)), 4, -4), "n_red_expert is -4"),
        ((np.ones((2, 1, 16)), 4, 3), "n_red_expert is 3"),
        ((np.ones((2, 1, 4)), 2, 8), "n_red_expert is 8"),
    ],
)
def test_wrong_arguments_are_named(arguments: Any, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        rebalance(*arguments, state={})
