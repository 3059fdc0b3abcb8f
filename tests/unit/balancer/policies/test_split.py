"""The split of a batch and the bound of the PAR, compared with a linear program."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancer.policies import plan
from balancer.policies.bounds import par_bound
from balancer.policies.problem import make_problem
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


@settings(max_examples=150)
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


@settings(max_examples=100)
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


@settings(max_examples=100)
@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=8),
    st.integers(1, 5),
    st.integers(0, 12),
)
def test_it_is_the_least_level_whose_replicas_have_slots(load, servers, extra) -> None:
    slots = min(len(load) + extra, servers * len(load))
    problem = make_problem([load], servers, slots)
    slots = int(np.minimum(problem.slots_LS, len(load)).sum())
    if not sum(load):
        assert par_bound(problem)[0] == 1
        return
    # Every level at which the number of replicas changes, and the mean.
    usable = int((problem.slots_LS > 0).sum())
    levels = sorted({x / r for x in load if x for r in range(1, usable + 1)})
    needed = {
        level: sum(max(1, math.ceil(x / level - 1e-9)) for x in load)
        if all(math.ceil(x / level - 1e-9) <= usable for x in load)
        else math.inf
        for level in levels
    }
    least = min(level for level in levels if needed[level] <= slots)
    mean = sum(load) / servers
    fill = least_fill(load, problem.slots_LS[0].tolist(), [1.0] * servers)
    assert par_bound(problem)[0] == pytest.approx(max(1.0, least / mean, fill / mean))


def least_fill(load: list[int], slots: list[int], speeds: list[float]) -> float:
    """The level to which servers must be filled when each takes no more experts than slots."""
    hottest = sorted(load, reverse=True)
    low, high = 0.0, sum(load) / min(speeds)
    for _ in range(100):
        level = (low + high) / 2
        taken = sum(min(level * v, sum(hottest[:c])) for v, c in zip(speeds, slots, strict=True))
        low, high = (low, level) if taken >= sum(load) * (1 - 1e-12) else (level, high)
    return high


@pytest.mark.parametrize("load", [5e-324, 1e-310, 1e-300])
def test_the_least_loads_that_numbers_can_have(load: float) -> None:
    with np.errstate(all="raise", under="ignore"):
        assert 1 <= par_bound(make_problem([[load, 0.0, 0.0, 0.0]], 3, 5))[0] <= 3


@given(st.data())
def test_no_placement_at_all_is_below_it(data: st.DataObject) -> None:
    """Every placement of a small cluster, each with its best split: servers without slots, of any speed."""
    servers, experts = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    slots_S = data.draw(
        st.lists(st.integers(0, experts), min_size=servers, max_size=servers).filter(
            lambda slots: sum(slots) >= experts
        )
    )
    speeds_S = np.array(
        data.draw(
            st.lists(st.sampled_from([0.25, 1.0, 1.5, 4.0]), min_size=servers, max_size=servers)
        )
    )
    load_E = np.array(
        data.draw(st.lists(st.integers(0, 9), min_size=experts, max_size=experts).filter(any)),
        dtype=float,
    )
    best = math.inf
    for held in itertools.product(
        *(list(itertools.combinations(range(experts), slots)) for slots in slots_S)
    ):
        holds_SE = np.zeros((servers, experts), bool)
        for server, of_it in enumerate(held):
            holds_SE[server, list(of_it)] = True
        if holds_SE.any(axis=0).all():
            best = min(best, least_fullness(load_E, holds_SE, speeds_S, np.zeros(servers)))
    bound = par_bound(make_problem(load_E[None], servers, slots_S, None, speeds_S))[0]
    assert bound <= best / (load_E.sum() / speeds_S.sum()) * (1 + 1e-9)
    if min(slots_S) == experts or set(slots_S) == {0, experts}:
        # Each server with slots can hold every expert: the bound is the optimum.
        assert bound == pytest.approx(best / (load_E.sum() / speeds_S.sum()))


@settings(max_examples=200)
@given(st.data())
def test_servers_without_slots_only_raise_the_mean(data: st.DataObject) -> None:
    """The bound is that of the other servers alone, over the mean of all: exact where that one is."""
    experts = data.draw(st.integers(1, 6))
    slots_S = np.array(data.draw(st.lists(st.integers(0, experts), min_size=2, max_size=7)))
    usable_S = slots_S > 0
    load_E = np.array(
        data.draw(st.lists(st.integers(0, 9), min_size=experts, max_size=experts).filter(any)),
        dtype=float,
    )
    speeds = st.sampled_from([0.25, 1.0, 1.5, 4.0])
    speeds_S = np.array(data.draw(st.lists(speeds, min_size=len(slots_S), max_size=len(slots_S))))
    if slots_S.sum() < experts:
        return
    bound = par_bound(make_problem(load_E[None], len(slots_S), slots_S, None, speeds_S))
    alone = make_problem(
        load_E[None], int(usable_S.sum()), slots_S[usable_S], None, speeds_S[usable_S]
    )
    ratio = speeds_S.sum() / speeds_S[usable_S].sum()
    assert bound == pytest.approx(par_bound(alone) * ratio)


def test_servers_without_slots_do_not_count_even_if_they_are_the_fastest() -> None:
    # 7 on a server of speed 1, over a mean of 7 / 3.5.
    assert par_bound(make_problem([[7, 0]], 3, [1, 1, 0], None, [1.0, 1.0, 1.5])) == [3.5]
    # Layers may differ.
    slots_LS = [[2, 2, 0], [2, 2, 2], [0, 0, 2]]
    assert par_bound(make_problem(np.ones((3, 2)), 3, slots_LS)) == pytest.approx([1.5, 1.0, 3.0])


@pytest.mark.parametrize("policy", ["fractional", "spread", "eplb", "scalpel", "craft"])
def test_a_plan_on_three_of_four_servers_is_proven_optimal(policy: str) -> None:
    found = plan(policy, [[1.0, 1.0, 1.0, 1.0, 1.0, 1.0]], 4, [6, 6, 6, 0])
    assert found.bound_L == [4 / 3]
    assert found.par_L == pytest.approx([4 / 3])
