"""Sparse layouts: the same as dense ones, and nothing dense while planning."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.policies import Layout, plan
from balancer.policies.moves import ordered_moves

SEEDS = st.integers(0, 2**32 - 1)


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Holds of any density, empty rows and layers among them, and shares for them."""
    rng = np.random.default_rng(seed)
    shape = rng.integers([1, 1, 1], [5, 9, 150])
    holds_LSE = rng.random(shape) < rng.choice([0.0, 0.02, 0.3, 1.0], (shape[0], shape[1], 1))
    return holds_LSE, np.where(holds_LSE, rng.random(shape), 0.0)


@given(SEEDS)
def test_it_is_the_dense_layout(seed: int) -> None:
    holds_LSE, shares_LSE = drawn(seed)
    found = Layout.of(holds_LSE, shares_LSE)
    assert len(found) == holds_LSE.sum()
    np.testing.assert_array_equal(found.holds_LSE, holds_LSE)
    np.testing.assert_array_equal(found.shares_LSE, shares_LSE)
    np.testing.assert_array_equal(found.count_LE, holds_LSE.sum(axis=1))
    load_LE = np.random.default_rng(seed).random(holds_LSE[:, 0].shape)
    expected_LS = np.einsum("lse,le->ls", shares_LSE, load_LE)
    np.testing.assert_allclose(found.server_load(load_LE), expected_LS, atol=1e-12)
    replicas_LE = np.maximum(holds_LSE.sum(axis=1, keepdims=True), 1)
    np.testing.assert_array_equal(Layout.of(holds_LSE).shares_LSE, holds_LSE / replicas_LE)
    before_LSE = np.random.default_rng(seed + 1).random(holds_LSE.shape) < 0.3
    added_L = found.added_to(Layout.of(before_LSE))
    assert added_L.tolist() == (holds_LSE & ~before_LSE).sum(axis=(1, 2)).tolist()


@given(SEEDS)
def test_parts_join_and_replicas_come_in_any_order(seed: int) -> None:
    holds_LSE, shares_LSE = drawn(seed)
    found = Layout.of(holds_LSE, shares_LSE)
    layers = len(holds_LSE)
    cut = seed % (layers + 1)
    parts = [found.part(0, cut), found.part(cut, layers)]
    joined = Layout.joined(parts)
    order_N = np.random.default_rng(seed).permutation(len(found))
    given_N = (found.row_N[order_N], found.expert_N[order_N], found.share_N[order_N])
    shuffled = Layout.of_replicas(found.shape, *given_N)
    for same in (joined, shuffled):
        assert same.shape == found.shape
        for one, other in zip(same.arrays, found.arrays, strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == other.dtype


def test_two_replicas_on_a_server_add_up() -> None:
    found = Layout.of_replicas(
        (1, 2, 3), np.array([1, 0, 1]), np.array([2, 2, 2]), np.array([0.25, 0.5, 0.25])
    )
    assert found.shares_LSE.tolist() == [[[0, 0, 0.5], [0, 0, 0.5]]]


def test_a_layout_is_a_current_one() -> None:
    rng = np.random.default_rng(0)
    load_LE, later_LE = rng.lognormal(0, 1, (2, 3, 16))
    first = plan("fractional", load_LE, 4, 20)
    with_plan = plan("fractional", later_LE, 4, 20, current=first)
    with_layout = plan("fractional", later_LE, 4, 20, current=first.layout)
    assert (with_plan.shares_LSE == with_layout.shares_LSE).all()
    assert with_plan.moves == with_layout.moves
    holds = first.holds_LSE, with_plan.holds_LSE
    assert with_plan.moves == ordered_moves(*holds, with_plan.problem.slots_LS)
    with pytest.raises(ValueError, match=r"current has shape \(3, 4, 16\), wanted \(3, 5, 16\)"):
        plan("fractional", later_LE, 5, 20, current=first.layout)


@pytest.mark.parametrize("policy", ["spread", "fractional", "eplb", "eplb-hierarchical", "craft"])
def test_planning_allocates_nothing_dense(policy: str) -> None:
    layers, servers, experts = 4, 500, 512
    load_LE = np.random.default_rng(0).lognormal(0, 1, (layers, experts))
    knobs = {"groups": 4, "nodes": 4} if policy == "eplb-hierarchical" else {}
    first = plan(policy, load_LE, servers, 1000, **knobs)
    tracemalloc.start()
    try:
        again = plan(policy, load_LE[:, ::-1], servers, 1000, current=first, **knobs)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Bytes of bools.
    assert peak < layers * servers * experts * 0.9
    assert again.holds_LSE.any(axis=1).all()
