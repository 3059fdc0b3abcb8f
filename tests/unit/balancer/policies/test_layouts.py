"""Layouts: in compact and sparse form, moves between them, and within memory."""

import tracemalloc

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from balancer.policies import Layout, plan
from balancer.policies.capacity import NoCapacityError, fit, without_spares
from balancer.policies.compact import Compact, place, refine, replicate
from balancer.policies.measure import par
from balancer.policies.moves import Move, ordered_moves

Float = npt.NDArray[np.float64]
_LOAD = st.one_of(st.integers(0, 3).map(float), st.floats(0, 1e6))


@st.composite
def placed(draw: st.DrawFn) -> tuple[Float, npt.NDArray[np.int64], Float, Compact]:
    experts, servers = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    load_LE = draw(hnp.arrays(np.float64, (2, experts), elements=_LOAD))
    total = draw(st.integers(experts, experts * servers))
    slots_LS = np.tile(total // servers + (np.arange(servers) < total % servers), (2, 1))
    speeds_S = draw(hnp.arrays(np.float64, servers, elements=st.sampled_from([1.0, 2.0])))
    count_LE = replicate(load_LE, np.minimum(slots_LS, experts).sum(axis=1), servers)
    return load_LE, slots_LS, speeds_S, place(load_LE, count_LE, slots_LS, speeds_S)


@settings(max_examples=200)
@given(placed())
def test_every_slot_is_used_by_an_expert_that_is_not_there(given_) -> None:
    _, slots_LS, _, found = given_
    held_LSE = found.layout().holds_LSE
    assert (held_LSE.sum(axis=2) == slots_LS).all()
    assert (held_LSE.sum(axis=1) == found.count_LE).all()


@settings(max_examples=200)
@given(placed(), st.integers(0, 9))
def test_refining_keeps_counts_and_never_raises_the_peak(given_, budget) -> None:
    load_LE, slots_LS, speeds_S, first = given_
    later = refine(first, load_LE, speeds_S, budget)
    held_LSE = later.layout().holds_LSE
    assert (held_LSE.sum(axis=2) == slots_LS).all()
    assert (held_LSE.sum(axis=1) == first.count_LE).all()
    before_L, after_L = (par(load_LE, *each.layout().dense(), speeds_S) for each in (first, later))
    assert (after_L <= before_L * (1 + 1e-9)).all()
    if budget == 0:
        assert (later.server_LP == first.server_LP).all()


def test_greedy_is_refined() -> None:
    # Greedy: 8 + 5 + 4 and 7 + 6; better: 6 + 5 + 4 and 7 + 8.
    load_LE = np.array([[8.0, 7.0, 6.0, 5.0, 4.0]])
    count_LE, slots_LS = np.ones((1, 5), dtype=np.int64), np.array([[3, 2]])
    first = place(load_LE, count_LE, slots_LS, np.ones(2))
    later = refine(first, load_LE, np.ones(2), 5)
    assert first.layout().server_load(load_LE).max() == 17
    assert later.layout().server_load(load_LE).max() == 15


@settings(max_examples=100)
@given(
    replicas=hnp.arrays(np.float64, (3, 7), elements=_LOAD),
    total=st.integers(7, 28),
    cap=st.integers(1, 4),
)
def test_replicas_lower_the_highest_load_as_far_as_they_can(replicas, total, cap) -> None:
    count_LE = replicate(replicas, np.full(3, total), cap)
    assert (count_LE.sum(axis=1) == min(total, 7 * cap)).all()
    assert count_LE.min() >= 1
    assert count_LE.max() <= cap
    for load_E, count_E in zip(replicas, count_LE, strict=True):
        highest = (load_E / count_E).max()
        if highest > 0 and total < 7 * cap:
            # For less, each expert would need these, which are more than there are.
            needed_E = np.ceil(load_E / (highest * (1 - 1e-9)))
            capped = (count_E == cap) & (load_E / count_E == highest)
            assert capped.any() or np.maximum(needed_E, 1).sum() > total


SEEDS = st.integers(0, 2**32 - 1)


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Holds of any density, empty rows and layers among them, and shares for them."""
    rng = np.random.default_rng(seed)
    shape = rng.integers([1, 1, 1], [5, 9, 150])
    holds_LSE = rng.random(shape) < rng.choice([0.0, 0.02, 0.3, 1.0], (shape[0], shape[1], 1))
    return holds_LSE, np.where(holds_LSE, rng.random(shape), 0.0)


@settings(max_examples=100)
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


@settings(max_examples=100)
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


Holds = npt.NDArray[np.bool_]


def layout(rng: np.random.Generator, experts: int, slots_S: npt.NDArray[np.int64]) -> Holds:
    """(1, S, E): each expert has a server, no server more than its slots."""
    holds_SE = np.zeros((len(slots_S), experts), dtype=np.bool_)
    for expert in rng.permutation(experts):
        holds_SE[rng.choice(np.flatnonzero(holds_SE.sum(axis=1) < slots_S)), expert] = True
    for server, expert in rng.integers(0, holds_SE.shape, (rng.integers(12), 2)):
        holds_SE[server, expert] |= holds_SE[server].sum() < slots_S[server]
    return holds_SE[None]


def way(seed: int) -> tuple[Holds, Holds, npt.NDArray[np.int64]]:
    """Two layouts, and slots of which few are free."""
    rng = np.random.default_rng(seed)
    experts, servers = rng.integers(1, [9, 6])
    slots_S = rng.multinomial(experts + rng.integers(3), rng.dirichlet(np.full(servers, 2.0)))
    return layout(rng, experts, slots_S), layout(rng, experts, slots_S), slots_S[None]


@settings(max_examples=300)
@given(SEEDS.map(way))
def test_every_step_is_safe(drawn: tuple[Holds, Holds, npt.NDArray[np.int64]]) -> None:
    first_LSE, then_LSE, slots_LS = drawn
    held_LSE = first_LSE.copy()
    over = 0
    for move in ordered_moves(first_LSE, then_LSE, slots_LS):
        at = (move.layer, move.server, move.expert)
        assert held_LSE[at] == (move.kind == "unload")
        if move.kind == "load" and held_LSE[at[:2]].sum() == slots_LS[at[:2]]:
            # One too many only where the layer has neither a free slot nor a spare replica.
            assert (held_LSE[move.layer].sum(axis=0) == 1).all()
            assert not (held_LSE[move.layer].sum(axis=1) < slots_LS[move.layer]).any()
        held_LSE[at] = move.kind == "load"
        assert held_LSE.any(axis=1).all()
        over = max(over, int((held_LSE.sum(axis=2) - slots_LS).max()))
    assert (held_LSE == then_LSE).all()
    assert over <= 1
    # One too many only where no server that gets nothing has a place to wait.
    done_LS = ~(then_LSE & ~first_LSE).any(axis=2)
    assert not (over and (done_LS & (first_LSE.sum(axis=2) < slots_LS)).any())


@pytest.mark.parametrize(
    ("first", "then", "slots", "moves"),
    [
        # Where there is room, a load comes first.
        ([[1, 0], [0, 1]], [[1, 1], [0, 0]], [2, 2], [(1, 0, "load"), (1, 1, "unload")]),
        # A full server unloads first what others hold.
        ([[1, 0], [1, 1]], [[0, 1], [1, 1]], [1, 2], [(0, 0, "unload"), (1, 0, "load")]),
    ],
)
def test_the_order_of_two_moves(first, then, slots, moves) -> None:
    found = ordered_moves(np.array([first], bool), np.array([then], bool), np.array([slots]))
    assert found == tuple(Move(0, *move) for move in moves)


LAYERS, SERVERS, EXPERTS = 2, 4, 6


def covering(rng: np.random.Generator, spare: float) -> np.ndarray:
    holds_LSE = rng.random((LAYERS, SERVERS, EXPERTS)) < spare
    layer, expert = np.nonzero(~holds_LSE.any(axis=1))
    holds_LSE[layer, rng.integers(SERVERS, size=len(layer)), expert] = True
    return holds_LSE


@given(seed=st.integers(0, 2**32), spare=st.floats(0, 0.9), more=st.integers(0, 6))
def test_every_expert_has_a_server_and_every_server_its_room(seed, spare, more) -> None:
    rng = np.random.default_rng(seed)
    wanted, held = covering(rng, spare), covering(rng, spare)
    capacity_S = rng.multinomial(LAYERS * EXPERTS + more, np.full(SERVERS, 1 / SERVERS))
    usable = np.minimum(capacity_S, LAYERS * EXPERTS).sum()
    assume(usable >= LAYERS * EXPERTS)
    found = fit(wanted, held, capacity_S)
    assert found.any(axis=1).all()
    assert (found.sum(axis=(0, 2)) <= capacity_S).all()
    replicas, before = found.sum(axis=1), wanted.sum(axis=1)
    assert (replicas <= before).all()
    # What could be given back was.
    free_S = capacity_S - found.sum(axis=(0, 2))
    for layer, expert in np.argwhere(replicas < before):
        assert not (~found[layer, :, expert] & (free_S > 0)).any()


@given(seed=st.integers(0, 2**32), spare=st.floats(0, 0.9))
def test_a_fitting_layout_stays(seed: int, spare: float) -> None:
    rng = np.random.default_rng(seed)
    wanted = covering(rng, spare)
    assert (fit(wanted, covering(rng, spare), wanted.sum(axis=(0, 2))) == wanted).all()


def test_too_little_memory_is_reported() -> None:
    wanted = covering(np.random.default_rng(0), 0.2)
    with pytest.raises(
        NoCapacityError, match=r"12 experts, and memory for 11 on 4 servers"
    ) as caught:
        fit(wanted, wanted, np.array([3, 3, 3, 2]), expert_bytes=1_000_000_000)
    for words in ("12.0 GB of expert memory", "have 11.0 GB", "start 1 more server"):
        assert words in str(caught.value)
    with pytest.raises(NoCapacityError, match="memory for 11"):
        # More than all experts is of no use to a server.
        fit(
            np.ones((LAYERS, 1, EXPERTS), bool), np.ones((LAYERS, 1, EXPERTS), bool), np.array([11])
        )


def test_only_what_a_living_server_has_too_is_spare() -> None:
    holds_LSE = np.zeros((1, 3, 3), bool)
    holds_LSE[0, 0] = holds_LSE[0, 1, 0] = holds_LSE[0, 2, 1] = True
    living_S = np.array([True, True, False])
    less_LSE, dropped = without_spares(holds_LSE, living_S, 0, 3)
    assert dropped == 1
    assert less_LSE[0, 0].tolist() == [False, True, True]
    assert (less_LSE[0, 1:] == holds_LSE[0, 1:]).all()
