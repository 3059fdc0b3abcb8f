"""Layers whose experts' loads move together are planned for all iterations of the window."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancer.policies import FractionalBalancer, plan
from balancer.policies.fractional.layout import lay_out
from balancer.policies.fractional.together import returns
from balancer.policies.fractional.window import noise, window_means
from balancer.policies.measure import par
from balancer.policies.problem import make_problem
from balancer.policies.types import Problem

POWER = 8
FURTHER = 0.2


def topics(
    seed: int, iterations: int, layers: int = 3, experts: int = 64, length: int = 12
) -> np.ndarray:
    """(I, L, E) counts; one of five topics at a time, each with its own popular experts."""
    rng = np.random.default_rng(seed)
    rates_KLE = np.exp(rng.standard_normal((5, layers, experts)))
    active_I: list[int] = []
    while len(active_I) < iterations:
        active_I += [int(rng.integers(5))] * int(rng.geometric(1 / length))
    return rng.poisson(20 * rates_KLE[active_I[:iterations]])


def never_planned() -> tuple[np.ndarray, np.ndarray, Problem]:
    """Loads (L, T, E) of topics, contiguous experts on 16 servers (L, S, E), and a slot more on each."""
    load_LTE = np.ascontiguousarray(topics(9, 96).swapaxes(0, 1), np.float32)
    held_LSE = np.stack([np.repeat(np.eye(16, dtype=bool), 4, axis=1)] * 3)
    return load_LTE, held_LSE, make_problem(load_LTE.mean(axis=1), 16, 80, held_LSE)


def found(window_WLE: np.ndarray) -> list[bool]:
    blocks_NLE = window_means(window_WLE)[1]
    length = len(window_WLE) / len(blocks_NLE)
    return returns(blocks_NLE, noise(window_WLE), length).tolist()


def objective(load_LTE: np.ndarray, shares_LSE: np.ndarray, speeds_S: np.ndarray) -> np.ndarray:
    """float64 (L): what `together.c` lowers, in plain NumPy."""
    mean_LT = load_LTE.sum(axis=2, dtype=float) / speeds_S.sum()
    parts_LTE = load_LTE / np.where(mean_LT > 0, mean_LT, 1)[:, :, None]
    parts_LTE = parts_LTE + FURTHER * (parts_LTE - parts_LTE.mean(axis=1, keepdims=True))
    full_LST = np.einsum("lse,lte->lst", shares_LSE, np.maximum(parts_LTE, 0)) / speeds_S[:, None]
    return ((full_LST**POWER).sum(axis=1) ** (1 / POWER)).mean(axis=1)


@pytest.mark.parametrize("length", [6, 12, 24])
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_topics_that_come_back_are_found(seed: int, length: int) -> None:
    assert found(topics(seed, 512, length=length)) == [True] * 3


@pytest.mark.parametrize("kind", ["steady", "drift", "flip", "constant", "one", "empty"])
def test_other_changes_are_left_to_the_forecast(kind: str) -> None:
    rng = np.random.default_rng(2)
    first, second = rng.standard_normal((2, 3, 64))
    angle_W = {"drift": np.linspace(0, 1, 256), "flip": np.where(np.arange(256) < 100, 0, 1.5)}
    angle_W11 = angle_W.get(kind, np.zeros(256))[:, None, None]
    rates_WLE = 30 * np.exp(np.cos(angle_W11) * first + np.sin(angle_W11) * second)
    window_WLE = rng.poisson(rates_WLE) if kind not in ("constant", "empty") else rates_WLE
    if kind == "empty":
        window_WLE = np.zeros((256, 3, 64))
    assert found(window_WLE[:1] if kind == "one" else window_WLE) == [False] * 3


@given(st.integers(2, 6), st.integers(0, 2**32), st.booleans())
def test_two_experts_that_peak_together_go_to_different_servers(servers, seed, spare) -> None:
    """Each server begins with a pair that is hot in the same iterations, at one of `servers` times."""
    rng = np.random.default_rng(seed)
    experts, order_E = 2 * servers, rng.permutation(2 * servers)
    time_T = np.tile(np.arange(servers), 8)
    load_TE = np.ones((len(time_T), experts))
    current_SE = np.zeros((servers, experts), bool)
    for pair in range(servers):
        load_TE[np.ix_(time_T == pair, order_E[2 * pair : 2 * pair + 2])] = 16
        current_SE[pair, order_E[2 * pair : 2 * pair + 2]] = True
    slots = 2 * servers + servers * spare
    problem = make_problem(load_TE.mean(axis=0)[None], servers, slots, current_SE[None])
    load_LTE = load_TE[None].astype(np.float32)
    shares_LSE = lay_out(problem, 0.001, load_LTE=load_LTE).shares_LSE
    together = [
        shares_LSE[0][:, order_E[2 * p : 2 * p + 2]].sum(axis=1).max() for p in range(servers)
    ]
    assert max(together) < 1.5


@given(st.integers(0, 2**32))
def test_shares_do_not_depend_on_the_order_of_the_iterations(seed: int) -> None:
    """Shares have one optimum. Where loads are too dear, they are all that changes."""
    rng = np.random.default_rng(seed)
    load_LTE = topics(seed, 48, 2, 24, 4).swapaxes(0, 1).astype(np.float32)
    first = plan("fractional", load_LTE[:, :8].mean(axis=1) + 1, 6, 36)
    problem = make_problem(load_LTE.mean(axis=1), 6, 36, first)
    values = []
    for order_T in (np.arange(48), rng.permutation(48)):
        mixed = np.ascontiguousarray(load_LTE[:, order_T])
        layout = lay_out(problem, 1000.0, load_LTE=mixed)
        assert (layout.holds_LSE == first.holds_LSE).all()
        values.append(objective(mixed, layout.shares_LSE, np.ones(6)))
    np.testing.assert_allclose(values[0], values[1], rtol=1e-4)
    assert (values[0] <= objective(load_LTE, first.shares_LSE, np.ones(6)) + 1e-4).all()


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.floats(0, 0.1), st.integers(1, 40), st.booleans())
def test_loads_pay_their_price_and_the_rules_are_kept(seed, price, iterations, alike) -> None:
    rng = np.random.default_rng(seed)
    servers, experts = int(rng.integers(1, 7)), int(rng.integers(1, 20))
    slots_S = rng.integers(0, 6, servers)
    while np.minimum(slots_S, experts).sum() < experts:
        slots_S[rng.integers(servers)] += 1
    speeds_S = np.ones(servers) if alike else rng.uniform(0.3, 3, servers)
    load_LTE = topics(seed, iterations, 2, experts, 3).swapaxes(0, 1).astype(np.float32)
    load_LTE *= rng.random((2, iterations, 1)) < 0.9
    load_LTE = np.ascontiguousarray(load_LTE, np.float32)
    first = plan("fractional", load_LTE.mean(axis=1) + 1, servers, slots_S, speeds_S=speeds_S)
    problem = make_problem(load_LTE.mean(axis=1), servers, slots_S, first, speeds_S)
    layout = lay_out(problem, price, load_LTE=load_LTE)
    holds_LSE, shares_LSE = layout.holds_LSE, layout.shares_LSE
    assert (holds_LSE.sum(axis=2) <= slots_S).all()
    assert holds_LSE.any(axis=1).all()
    assert ((shares_LSE > 0) == holds_LSE).all()
    np.testing.assert_allclose(shares_LSE.sum(axis=1), 1)
    before_L = objective(load_LTE, first.shares_LSE, speeds_S)
    after_L = objective(load_LTE, shares_LSE, speeds_S)
    loads_L = (holds_LSE & ~first.holds_LSE).sum(axis=(1, 2))
    assert (before_L - after_L >= price * loads_L - 1e-3 * before_L).all()
    threads = lay_out(problem, price, load_LTE=load_LTE, threads=2)
    for ours, theirs in zip(layout.arrays, threads.arrays, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("price", [0.0005, 1000.0])
def test_a_placement_that_nobody_planned_is_left_for_a_better_one_if_that_pays(price) -> None:
    load_LTE, held_LSE, problem = never_planned()
    layout = lay_out(problem, price, load_LTE=load_LTE)
    before_L = objective(load_LTE, held_LSE.astype(float), np.ones(16))
    after_L = objective(load_LTE, layout.shares_LSE, np.ones(16))
    loads_L = (layout.holds_LSE & ~held_LSE).sum(axis=(1, 2))
    assert (before_L - after_L >= price * loads_L - 1e-3 * before_L).all()
    if price > 1:
        assert not loads_L.any()
    else:
        # Far better than what moves alone reach, which fill the free slot of each server first.
        assert (after_L < 0.75 * before_L).all()
        assert (loads_L > 16).all()
        # Of the 80 replicas in a layer many stay: as good layouts differ in that.
        assert (loads_L <= 60).all()


def test_a_plan_from_nothing_and_one_with_layers_of_both_kinds() -> None:
    window_WLE = topics(5, 256, 4)
    rng = np.random.default_rng(6)
    window_WLE[:, 1] = rng.poisson(20 * np.exp(rng.standard_normal(64)), (256, 64))
    assert found(window_WLE) == [True, False, True, True]
    load_LE = window_WLE.sum(axis=0)
    mixed = plan("fractional", load_LE, 16, 80, window_WLE=window_WLE)
    assert mixed.holds_LSE.any(axis=1).all()
    assert (mixed.par_L >= mixed.bound_L).all()
    alone = plan("fractional", load_LE[1:2], 16, 80, window_WLE=window_WLE[:, 1:2])
    assert (mixed.holds_LSE[1] == alone.holds_LSE[0]).all()
    moving = plan("fractional", load_LE[2:], 16, 80, window_WLE=window_WLE[:, 2:])
    assert (mixed.holds_LSE[2:] == moving.holds_LSE).all()


def test_topics_are_balanced_better_than_by_their_mean_and_with_few_loads() -> None:
    counts_ILE = topics(7, 6 * 256, 3)
    balancer = FractionalBalancer(16, 80)
    mean = balancer.step(counts_ILE[:256])
    own, by_mean, transit = [], [], []
    for begin in range(256, 5 * 256, 256):
        past, now = counts_ILE[begin : begin + 256], counts_ILE[begin + 256 : begin + 512]
        planned = balancer.step(past)
        mean = plan("fractional", past.sum(axis=0), 16, 80, current=mean)
        transit.append(planned.transit)
        for load_LE in now[::8].astype(float):
            own.append(par(load_LE, planned.holds_LSE, planned.shares_LSE, np.ones(16)).mean())
            by_mean.append(par(load_LE, mean.holds_LSE, mean.shares_LSE, np.ones(16)).mean())
    assert np.mean(own) < 0.95 * np.mean(by_mean)
    assert max(transit) < 3 * 80 / 2


def test_the_cross_node_limit_is_kept_with_topics_too() -> None:
    window_WLE = topics(8, 256)
    nodes_S = np.arange(16) // 4
    planned = plan(
        "fractional",
        *(window_WLE.sum(axis=0), 16, 80),
        window_WLE=window_WLE,
        nodes_S=nodes_S,
        cross_node_replicas=3,
    )
    at_LEN = np.stack([planned.holds_LSE[:, nodes_S == n].any(axis=1) for n in range(4)], axis=2)
    assert ((at_LEN.sum(axis=2) - 1).sum(axis=1) <= 3).all()


def test_no_expert_is_lost_where_a_server_is_all_but_stopped() -> None:
    """With such speeds the risk of its last free slots is infinite."""
    experts, window_WLE = 16, np.full((64, 1, 16), 0.01, np.float32)
    for i, load_E in enumerate(window_WLE[:, 0]):
        load_E[(i // 4) % 2 * 8 :][:8] += 100
    for exponent in (19.0, 19.5, 19.9, 20.5):
        speeds_S = [10.0**-exponent, 1, 1, 1]
        plan = FractionalBalancer(4, [4, 4, 4, 4], speeds_S=speeds_S).step(window_WLE)
        assert len(np.unique(plan.layout.expert_N)) == experts


@pytest.mark.parametrize("servers", [2, 3, 7, 11, 13])
def test_moves_find_another_server_in_clusters_of_any_size(servers: int) -> None:
    """All servers but the hot one are equally full; a layout from nothing would be too dear."""
    time_T = np.tile(np.arange(servers), 8)
    load_TE = np.ones((len(time_T), 2 * servers), np.float32)
    load_TE[np.repeat(np.arange(servers), 2) == time_T[:, None]] = 16
    current_SE = np.repeat(np.eye(servers, dtype=bool), 2, axis=1)
    problem = make_problem(load_TE.mean(axis=0)[None], servers, 2 * servers, current_SE[None])
    holds_SE = lay_out(problem, 0.001, load_LTE=load_TE[None], anew=1e9).holds_LSE[0]
    assert not (holds_SE[:, ::2] & holds_SE[:, 1::2]).any()


@pytest.mark.parametrize("unit", [1e-44, 1e-41, 1e-38, 1e20])
def test_plans_do_not_depend_on_the_unit_of_the_load(unit: float) -> None:
    load_LTE, _, problem = never_planned()
    value_L, other_L = (
        objective(load_LTE, lay_out(problem, 0.0005, load_LTE=load).shares_LSE, np.ones(16))
        for load in (load_LTE, load_LTE * np.float32(unit))
    )
    np.testing.assert_allclose(other_L, value_L, rtol=0.03)


def test_a_layout_from_nothing_pays_its_price_several_times_after_a_short_window() -> None:
    load_LTE, held_LSE, problem = never_planned()
    loads_L, fewer_L = (
        (lay_out(problem, 0.0005, load_LTE=load_LTE, anew=anew).holds_LSE & ~held_LSE).sum((1, 2))
        for anew in (1.0, 1000.0)
    )
    assert (fewer_L < loads_L).all()
