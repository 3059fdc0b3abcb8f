"""Routing arithmetic: the guide's worked numbers, scalar versions, and invariants."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from simulator.routing import (
    allocate_replicas,
    balancedness,
    combine,
    drop_over_capacity,
    expert_capacity,
    pack_longest_first,
    redundancy_bytes,
    replica_loads,
    route_grouped,
    route_topk,
    softmax,
    spill_over_capacity,
    straggler_time,
)

logits = hnp.arrays(
    np.float64,
    st.tuples(st.integers(1, 6), st.integers(2, 9)),
    elements=st.floats(-50, 50, width=16),
)
choices = hnp.arrays(
    np.int64, st.tuples(st.integers(0, 30), st.integers(1, 3)), elements=st.integers(0, 4)
)


# -- gating -----------------------------------------------------------------------------------------


@given(logits, st.data())
def test_topk_is_what_a_loop_over_tokens_finds(logits_TE: Any, data: st.DataObject) -> None:
    experts = logits_TE.shape[1]
    top_k = data.draw(st.integers(1, experts))
    ids_TK, weights_TK = route_topk(logits_TE, top_k)
    _, raw_TK = route_topk(logits_TE, top_k, renormalize=False)
    for gates, ids, weights, raw in zip(
        softmax(logits_TE), ids_TK, weights_TK, raw_TK, strict=True
    ):
        order = sorted(range(experts), key=lambda i: (-gates[i], i))[:top_k]
        assert ids.tolist() == order
        assert raw == pytest.approx(gates[order])
        assert weights == pytest.approx(gates[order] / sum(gates[order]))
        assert weights.sum() == pytest.approx(1.0)
        assert (np.diff(weights) <= 1e-12).all()


def test_renormalised_results_stay_between_the_experts() -> None:
    rng = np.random.default_rng(1)
    rows_ETH = rng.normal(size=(8, 5, 4))
    ids, weights = route_topk(rng.normal(size=(5, 8)), 3)
    out_TH = combine(rows_ETH, ids, weights)
    for token in range(5):
        picked = rows_ETH[ids[token], token]
        assert out_TH[token] == pytest.approx(weights[token] @ picked)
        assert (out_TH[token] >= picked.min(0) - 1e-9).all()
        assert (out_TH[token] <= picked.max(0) + 1e-9).all()


def test_the_bias_chooses_and_does_not_weigh() -> None:
    logits_TE = np.array([[2.0, 1.0, 0.0, -1.0]])
    ids, weights = route_grouped(logits_TE, [0, 0, 0, 9], 2, scale=2.5)
    assert ids.tolist() == [[3, 0]]
    affinity = 1 / (1 + np.exp(-np.array([-1.0, 2.0])))
    assert weights[0] == pytest.approx(2.5 * affinity / affinity.sum())
    _, raw = route_grouped(logits_TE, [0, 0, 0, 9], 2, renormalize=False)
    assert raw[0] == pytest.approx(affinity)


def test_a_token_keeps_to_its_best_groups() -> None:
    # Group 0 has the best single expert; 1 and 2 have the better pairs.
    logits_TE = np.array([[3.0, -9.0, 2.0, 2.0, 1.9, 1.9]])
    ids, _ = route_grouped(logits_TE, np.zeros(6), 3, groups=3, top_groups=2)
    assert ids.tolist() == [[2, 3, 4]]
    everywhere, _ = route_grouped(logits_TE, np.zeros(6), 3, groups=3, top_groups=3)
    assert everywhere.tolist() == [[0, 2, 3]]


# -- capacity ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts", "factor", "capacity"),
    [
        (1024, 2, 8, 1.25, 320),
        (1024, 2, 8, 1.0, 256),
        (1024, 1, 4, 1.5, 384),
        (1000, 1, 8, 1.2, 150),
        (7, 1, 2, 0, 0),
    ],
)
def test_capacity(tokens: int, top_k: int, experts: int, factor: float, capacity: int) -> None:
    assert expert_capacity(tokens, top_k, experts, factor) == capacity


@given(choices, st.integers(0, 12))
def test_drop_is_what_a_loop_over_places_finds(ids_TK: Any, capacity: int) -> None:
    kept = drop_over_capacity(ids_TK, 5, capacity)
    seen = [0] * 5
    for expert, is_kept in zip(ids_TK.ravel().tolist(), kept.ravel().tolist(), strict=True):
        assert is_kept == (seen[expert] < capacity)
        seen[expert] += is_kept
    # More room never drops more.
    assert (kept <= drop_over_capacity(ids_TK, 5, capacity + 1)).all()


@given(choices, st.integers(0, 12))
def test_spill_keeps_limits_and_drops_only_what_has_no_room(choices_TC: Any, capacity: int) -> None:
    expert_T = spill_over_capacity(choices_TC, 5, capacity)
    counts = np.bincount(expert_T[expert_T >= 0], minlength=5)
    assert (counts <= capacity).all()
    first = drop_over_capacity(choices_TC[:, 0], 5, capacity)
    assert (expert_T[first] == choices_TC[first, 0]).all()
    for expert, wanted in zip(expert_T.tolist(), choices_TC.tolist(), strict=True):
        if expert < 0:
            assert (counts[wanted] == capacity).all()
        else:
            assert expert in wanted


# -- balance ----------------------------------------------------------------------------------------


def test_one_hot_expert_pins_the_layer() -> None:
    load = [1.0] * 99 + [50.0]
    assert straggler_time(load) == 50.0
    assert balancedness(load) < 0.03
    assert balancedness([10, 10, 10, 10]) == 1.0
    assert balancedness([100, 1, 1, 1]) < 0.3
    assert balancedness([0, 0]) == 1.0
    assert straggler_time([8, 2], [4, 1]) == 2.0
    assert balancedness([3, 1, 7]) == pytest.approx(balancedness([21.9, 7.3, 51.1]))


def test_a_replica_of_the_hot_expert_halves_the_straggler() -> None:
    load = [90.0, 10.0, 10.0, 10.0]
    assert straggler_time(pack_longest_first(load, 4)) == 90.0
    replicas = allocate_replicas(load, 5)
    assert replicas.tolist() == [2, 1, 1, 1]
    after = pack_longest_first(replica_loads(load, replicas), 4)
    assert straggler_time(after) == 45.0
    assert after.sum() == sum(load)


def best_maximum(load_R: Any, servers: int) -> float:
    return min(
        np.bincount(places, weights=load_R, minlength=servers).max()
        for places in product(range(servers), repeat=len(load_R))
    )


def test_a_seventh_slot_makes_it_worse() -> None:
    load = [90.0, 10.0, 10.0, 10.0]
    six, seven = (replica_loads(load, allocate_replicas(load, slots)) for slots in (6, 7))
    assert best_maximum(six, 4) == pytest.approx(30.0)
    assert best_maximum(seven, 4) == pytest.approx(32.5)


@given(
    hnp.arrays(np.float64, st.integers(3, 6), elements=st.integers(1, 12)),
    st.integers(2, 3),
)
def test_longest_first_is_within_four_thirds(load_R: Any, servers: int) -> None:
    best = best_maximum(load_R, servers)
    assert best - 1e-9 <= pack_longest_first(load_R, servers).max() <= 4 / 3 * best + 1e-9


@given(
    hnp.arrays(np.float64, st.integers(1, 8), elements=st.floats(0.0, 100.0)), st.integers(0, 12)
)
def test_replicas_go_to_the_highest_load_each(load_E: Any, spare: int) -> None:
    expected = np.ones(len(load_E), np.int64)
    for _ in range(spare):
        expected[np.argmax(load_E / expected)] += 1
    assert (allocate_replicas(load_E, len(load_E) + spare) == expected).all()


def grouped(**limits: int) -> object:
    return route_grouped(np.zeros((1, 6)), np.zeros(6), 3, **limits)


@pytest.mark.parametrize(
    ("named", "wrong"),
    [
        ("top_k", lambda: route_topk(np.zeros((1, 4)), 0)),
        ("top_k", lambda: route_topk(np.zeros((1, 4)), 5)),
        ("groups", lambda: grouped(groups=4)),
        ("top_groups", lambda: grouped(groups=3, top_groups=4)),
        ("top_k", lambda: grouped(groups=3, top_groups=1)),
        ("experts", lambda: expert_capacity(8, 1, 0, 1.0)),
        ("factor", lambda: expert_capacity(8, 1, 4, -0.1)),
        ("factor", lambda: expert_capacity(8, 1, 4, float("nan"))),
        ("slots", lambda: allocate_replicas([1, 2, 3], 2)),
        ("replicas_E: expert 1", lambda: replica_loads([1, 2], [1, 0])),
    ],
)
def test_what_cannot_be_is_named(named: str, wrong: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=f"^{named}"):
        wrong()


def test_a_redundant_expert_of_deepseek_v3_costs_2_4_gib_a_server() -> None:
    assert redundancy_bytes(58, 3 * 7168 * 2048, 1) / 2**30 == pytest.approx(2.4, abs=0.03)


@given(hnp.arrays(np.float64, st.integers(1, 19), elements=st.floats(0.1, 9.0)))
def test_balancedness_knows_no_scale(load_S: Any) -> None:
    assert 0 < balancedness(load_S) <= 1 + 1e-12
    assert balancedness(load_S) == pytest.approx(balancedness(load_S * 7.3))
