"""The policy that places for the split."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancer.policies import FractionalBalancer, Plan, plan
from eaas.minmax import levels

Situation = tuple[np.ndarray, int, np.ndarray, np.ndarray]


def loads_of(kind: str, rng: np.random.Generator, layers: int, experts: int) -> np.ndarray:
    if kind == "even":
        return np.ones((layers, experts))
    if kind == "zipf":
        ranks = 1 / np.arange(1, experts + 1) ** 1.6
        return np.stack([rng.permutation(ranks) for _ in range(layers)])
    if kind == "sparse":
        return rng.lognormal(0, 2, (layers, experts)) * (rng.random((layers, experts)) < 0.1)
    if kind == "one":
        return np.eye(layers, experts)
    if kind == "counts":
        return rng.poisson(3, (layers, experts)).astype(float)
    return rng.lognormal(0, 1, (layers, experts))


KINDS = ("lognormal", "even", "zipf", "sparse", "one", "counts")


@st.composite
def situations(draw: st.DrawFn) -> Situation:
    """Loads (L, E), servers, slots (S), speeds (S)."""
    experts, servers = draw(st.integers(1, 24)), draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    slots_S = rng.integers(0, draw(st.integers(1, 8)) + 1, servers)
    while np.minimum(slots_S, experts).sum() < experts:
        slots_S[rng.integers(servers)] += 1
    speeds_S = rng.uniform(0.2, 4, servers) if draw(st.booleans()) else np.ones(servers)
    return loads_of(draw(st.sampled_from(KINDS)), rng, 2, experts), servers, slots_S, speeds_S


def check(planned: Plan, slots_S: np.ndarray) -> None:
    assert (planned.holds_LSE.sum(axis=2) <= slots_S).all()
    assert planned.holds_LSE.any(axis=1).all()
    np.testing.assert_allclose(planned.shares_LSE.sum(axis=1), 1)
    assert ((planned.shares_LSE > 0) == planned.holds_LSE).all()
    assert np.isfinite(planned.par_L).all()
    assert (planned.par_L >= planned.bound_L - 1e-9).all()


def split_par(load_LE: np.ndarray, holds_LSE: np.ndarray, speeds_S: np.ndarray) -> np.ndarray:
    """PAR of each layer (L) with the best shares over this placement."""
    layers = [
        levels(load_E[None], holds_SE, speeds_S)[0]
        for load_E, holds_SE in zip(load_LE, holds_LSE, strict=True)
    ]
    mean_L = load_LE.sum(axis=1) / speeds_S.sum()
    return np.divide(layers, mean_L, out=np.ones_like(mean_L), where=mean_L > 0)


@settings(max_examples=200)
@given(situations())
def test_a_plan_from_nothing_keeps_the_rules_with_the_best_split(drawn: Situation) -> None:
    load_LE, servers, slots_S, speeds_S = drawn
    planned = plan("fractional", load_LE, servers, slots_S, speeds_S=speeds_S)
    check(planned, slots_S)
    again = plan("fractional", load_LE, servers, slots_S, speeds_S=speeds_S)
    assert (again.holds_LSE == planned.holds_LSE).all()
    assert (again.shares_LSE == planned.shares_LSE).all()
    best_L = split_par(load_LE, planned.holds_LSE, speeds_S)
    # A replica that is not needed has a share of a millionth all the same.
    np.testing.assert_allclose(planned.par_L, best_L, rtol=2e-4)


@settings(max_examples=200)
@given(situations(), st.integers(0, 2**32))
def test_a_plan_from_any_holds_keeps_the_rules(drawn: Situation, seed: int) -> None:
    load_LE, servers, slots_S, speeds_S = drawn
    rng = np.random.default_rng(seed)
    # Too many on some servers, none of some experts: as after servers came and went.
    shape = (2, servers, load_LE.shape[1])
    current_LSE = rng.random(shape) < rng.uniform(0, 0.8)
    planned = plan("fractional", load_LE, servers, slots_S, speeds_S=speeds_S, current=current_LSE)
    check(planned, slots_S)
    assert planned.transit == np.count_nonzero(planned.holds_LSE & ~current_LSE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("servers", "slots", "experts"),
    [(32, 288, 256), (64, 320, 256), (256, 512, 256), (288, 576, 256), (7, 44, 37), (3, 11, 8)],
)
def test_par_is_one_wherever_servers_have_a_slot_to_spare(kind, servers, slots, experts) -> None:
    load_LE = loads_of(kind, np.random.default_rng(7), 3, experts)
    planned = plan("fractional", load_LE, servers, slots)
    assert planned.par_L.max() <= 1.001


def test_a_changed_load_is_balanced_again_with_few_loads() -> None:
    rng = np.random.default_rng(2)
    load_LE = rng.lognormal(0, 1, (3, 256))
    for servers, slots, change, part in (
        (64, 320, 0.05, 0.06),
        (64, 320, 0.3, 0.2),
        (288, 576, 0.3, 0.18),
    ):
        later_LE = load_LE * rng.lognormal(0, change, load_LE.shape)
        first = plan("fractional", load_LE, servers, slots)
        assert plan("fractional", load_LE, servers, slots, current=first).transit == 0
        after = plan("fractional", later_LE, servers, slots, current=first)
        assert after.par_L.max() <= 1.001
        assert 0 < after.transit < 3 * slots * part


@settings(max_examples=200)
@given(
    st.integers(0, 2**32),
    st.integers(1, 9),
    st.integers(2, 5),
    st.sampled_from(KINDS),
    st.booleans(),
    st.booleans(),
)
def test_par_is_one_in_every_such_case_from_nothing_and_where_loads_cost_nothing(
    seed: int, servers: int, slots: int, kind: str, from_nothing: bool, full: bool
) -> None:
    rng = np.random.default_rng(seed)
    most = (slots - 1) * servers + 1
    experts = most if full else int(rng.integers(1, most + 1))
    load_LE = loads_of(kind, rng, 2, experts)
    current_LSE = None if from_nothing else rng.random((2, servers, experts)) < rng.random()
    planned = plan(
        "fractional", load_LE, servers, servers * slots, current=current_LSE, expert_bytes=0
    )
    check(planned, np.full(servers, slots))
    assert planned.par_L.max() <= 1.001


def test_moves_that_do_not_pay_are_not_planned() -> None:
    rng = np.random.default_rng(2)
    before_LE = rng.lognormal(0, 1, (4, 64))
    after_LE = before_LE * rng.lognormal(0, 0.4, (4, 64))
    first = plan("fractional", before_LE, 16, 96)
    free, priced, too_dear = (
        plan("fractional", after_LE, 16, 96, current=first, stall_s=stall_s, horizon_s=60.0)
        for stall_s in (0.0, 0.05, 1e6)
    )
    assert free.par_L.mean() < 1.01
    assert too_dear.transit == 0
    assert 0 < priced.transit < free.transit
    assert free.par_L.mean() <= priced.par_L.mean() < too_dear.par_L.mean()
    # What was moved is worth it: 60 s of service in 4 layers against 0.05 s for each load.
    saved_s = (too_dear.par_L.mean() - priced.par_L.mean()) * 60.0
    assert saved_s > priced.transit * 0.05


@settings(max_examples=100)
@given(situations(), st.integers(1, 4), st.integers(0, 6), st.booleans())
def test_the_cross_node_limit_is_kept(drawn, nodes, limit, from_something) -> None:
    load_LE, servers, slots_S, speeds_S = drawn
    nodes_S = np.arange(servers) % nodes
    current = plan("spread", load_LE, servers, slots_S) if from_something else None
    planned = plan(
        "fractional", load_LE, servers, slots_S,
        speeds_S=speeds_S, current=current, nodes_S=nodes_S, cross_node_replicas=limit,
    )  # fmt: skip
    check(planned, slots_S)
    held_LNE = np.stack(
        [planned.holds_LSE[:, nodes_S == node].any(axis=1) for node in range(nodes)], axis=1
    )
    cross_node_LE = held_LNE.sum(axis=1) - 1
    assert (cross_node_LE.sum(axis=1) <= limit).all()


def test_one_expert_per_node_border_is_enough_for_balance() -> None:
    load_LE = np.random.default_rng(4).lognormal(0, 1, (3, 256))
    planned = plan(
        "fractional", load_LE, 64, 320, nodes_S=np.arange(64) // 8, cross_node_replicas=7
    )
    assert planned.par_L.max() <= 1.001


@pytest.mark.parametrize(
    "knobs",
    [
        {"expert_bytes": -1.0},
        {"link_bytes_per_s": 0.0},
        {"stall_s": np.nan},
        {"horizon_s": 0.0},
        {"least_gain": -0.1},
        {"cross_node_replicas": 1},
        {"cross_node_replicas": -1, "nodes_S": [0, 0]},
        {"cross_node_replicas": 1, "nodes_S": [0]},
        {"window_WLE": np.ones((3, 1, 5))},
    ],
)
def test_wrong_knobs_are_named(knobs) -> None:
    name = next(iter(knobs)) if len(knobs) > 1 or "cross_node_replicas" not in knobs else "nodes_S"
    with pytest.raises(ValueError, match=f"{name}|nodes_S"):
        plan("fractional", np.ones((1, 4)), 2, 4, **knobs)


def drifting(rng: np.random.Generator, windows: int, layers: int = 3) -> np.ndarray:
    """(windows, W, L, E) counts whose popularity turns steadily."""
    first, second = rng.standard_normal((2, layers, 64))
    angles = np.linspace(0, 2, windows * 64)
    rates_ILE = np.exp(
        np.cos(angles)[:, None, None] * first + np.sin(angles)[:, None, None] * second
    )
    return rng.poisson(30 * rates_ILE).reshape(windows, 64, layers, 64)


def test_steps_follow_a_drift_with_few_loads_and_beat_stale_plans() -> None:
    windows = drifting(np.random.default_rng(8), 6)
    balancer = FractionalBalancer(16, 96)
    own, stale = [], []
    first = previous = balancer.step(windows[0])
    for past, now in pairwise(windows[1:]):
        planned = balancer.step(past)
        assert planned.transit == np.count_nonzero(planned.holds_LSE & ~previous.holds_LSE)
        assert 0 < planned.transit < 3 * 96 / 2
        previous = planned
        for load_LE in now[::16]:
            own.append(split_par(load_LE, planned.holds_LSE, np.ones(16)).mean())
            stale.append(split_par(load_LE, first.holds_LSE, np.ones(16)).mean())
    assert np.mean(own) < np.mean(stale) - 0.05


def test_a_window_is_planned_for_what_comes_next() -> None:
    windows = drifting(np.random.default_rng(9), 3)
    past, now = windows[1], windows[2]
    ahead = plan("fractional", past.sum(axis=0), 16, 96, window_WLE=past)
    behind = plan("fractional", past.sum(axis=0), 16, 96)
    later = [
        np.mean([split_par(load_LE, planned.holds_LSE, np.ones(16)).mean() for load_LE in now[::8]])
        for planned in (ahead, behind)
    ]
    assert later[0] < later[1]


def test_a_steady_window_needs_one_plan() -> None:
    window_WLE = np.tile(np.random.default_rng(10).lognormal(0, 1, (1, 3, 64)), (32, 1, 1))
    balancer = FractionalBalancer(16, 96)
    assert balancer.step(window_WLE).par_L.max() <= 1.001
    second = balancer.step(window_WLE)
    assert (second.transit, second.moves) == (0, ())


@pytest.mark.parametrize("window", [np.ones((2, 3)), -np.ones((2, 1, 4)), np.ones((0, 1, 4))])
def test_a_wrong_window_is_named(window) -> None:
    with pytest.raises(ValueError, match="hotness_WLE"):
        FractionalBalancer(2, 5).step(window)


def test_a_large_cluster_is_planned_for_one_forecast_and_stays_balanced() -> None:
    """More than 131,072 slots over all layers: six forecasts, or all iterations, would take a minute."""
    rng = np.random.default_rng(3)
    layers, experts, servers, slots = 17, 512, 4000, 8000
    topics_KLE = rng.lognormal(0, 1, (2, layers, experts))
    active_W = np.arange(64) // 4 % 2
    balancer = FractionalBalancer(servers, slots)
    for _ in range(2):
        planned = balancer.step(rng.poisson(200 * topics_KLE[active_W]))
        topics_KLE *= rng.lognormal(0, 0.3, (layers, experts))
        assert (planned.layout.count_LE > 0).all()
        assert planned.layout.count_LE.sum(axis=1).max() <= slots
        assert planned.par_L.max() < 1.05
