"""Cost models, and the choices that minimise them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_client.scheduler.cost import ImbalanceCost, ServerCost
from eaas.errors import ConfigError


def placement(rng: np.random.Generator, servers: int, experts: int) -> np.ndarray:
    """Each expert on one or more servers, with random shares."""
    holds_SE = rng.random((servers, experts)) < 0.5
    holds_SE[rng.integers(servers, size=experts), np.arange(experts)] = True
    shares_SE = np.where(holds_SE, rng.random((servers, experts)) + 0.01, 0)
    return shares_SE / shares_SE.sum(axis=0)


def server_times(cost: ServerCost, load_E: np.ndarray) -> np.ndarray:
    """Times by the formula: (L, S)."""
    load_LE = load_E.reshape(len(cost.shares_LSE), -1)
    pairs_LSE = cost.shares_LSE * load_LE[:, None] / cost.steps
    active_LS = (1 - np.exp(-pairs_LSE)).sum(axis=2)
    return np.maximum(cost.load_s * active_LS, cost.pair_s * pairs_LSE.sum(axis=2))


@st.composite
def clusters(draw: st.DrawFn) -> tuple[ServerCost, np.ndarray]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    experts, servers = draw(st.integers(1, 24)), draw(st.integers(1, 5))
    layers = draw(st.integers(1, 3))
    cost = ServerCost(
        np.array([placement(rng, servers, experts) for _ in range(layers)]),
        fixed_s=1e-4,
        load_s=draw(st.sampled_from((0.0, 1e-4))),
        pair_s=draw(st.sampled_from((1e-5, 1e-4))),
        steps=draw(st.integers(1, 100)),
    )
    return cost, rng.gamma(0.5, 30.0, (draw(st.integers(1, 16)), layers * experts))


@settings(deadline=None)
@given(clusters())
def test_a_step_takes_as_long_as_its_slowest_server(drawn: tuple[ServerCost, np.ndarray]) -> None:
    cost, window_WE = drawn
    load_E = window_WE.sum(axis=0)
    wanted_s = cost.steps * (1e-4 + server_times(cost, load_E).max(axis=1)).sum()
    assert cost.batch_s(load_E) == pytest.approx(wanted_s, rel=1e-5)


@settings(deadline=None)
@given(clusters(), st.integers(1, 8), st.booleans())
def test_each_chosen_request_has_the_best_score(
    drawn: tuple[ServerCost, np.ndarray], take: int, running: bool
) -> None:
    cost, window_WE = drawn
    take = min(take, len(window_WE))
    start_E = window_WE[-1].copy() if running else None
    chosen = np.zeros(take, dtype=np.int64)
    batch_s = cost.choose(window_WE, start_E, chosen, 1)
    assert len(set(chosen.tolist())) == take
    load_E = window_WE[0] + (0 if start_E is None else start_E)
    for step in range(1, take):
        left = [w for w in range(len(window_WE)) if w not in chosen[:step]]
        worth = {w: server_times(cost, load_E + window_WE[w]) for w in left}
        scores = {w: (times.max(axis=1) + times.mean(axis=1)).sum() for w, times in worth.items()}
        # Single precision ranks what differs by more than its rounding.
        assert scores[int(chosen[step])] <= min(scores.values()) * (1 + 1e-4)
        load_E = load_E + window_WE[chosen[step]]
    assert batch_s == pytest.approx(cost.batch_s(load_E), rel=1e-5)


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 6))
def test_imbalance_is_one_plus_cv(seed: int, have: int) -> None:
    rng = np.random.default_rng(seed)
    window_WE = rng.multinomial(400, rng.dirichlet(np.ones(12)), size=9).astype(float)
    cost = ImbalanceCost(base_s=0.5, sensitivity=0.4)
    chosen = np.arange(6)
    batch_s = cost.choose(window_WE, None, chosen, have)
    load_E = window_WE[chosen].sum(axis=0)
    assert batch_s == pytest.approx(0.5 * (1 + 0.4 * load_E.std() / load_E.mean()))
    assert cost.batch_s(load_E) == pytest.approx(batch_s)
    assert ImbalanceCost(0.5, 0.4).batch_s(np.zeros(12)) == 0.5


def two_kinds() -> tuple[np.ndarray, np.ndarray]:
    """A window of alternating domains, and a placement with each domain on both servers."""
    window_WE = np.zeros((8, 8))
    window_WE[::2, :4] = 10.0
    window_WE[1::2, 4:] = 10.0
    shares_SE = np.zeros((2, 8))
    shares_SE[0, ::2] = shares_SE[1, 1::2] = 1.0
    return window_WE, shares_SE


def test_the_placement_decides_which_requests_are_complementary() -> None:
    """With each domain on both servers, compute-bound choices are all equal."""
    window_WE, shares_SE = two_kinds()
    cost = ServerCost(shares_SE, fixed_s=0, load_s=0, pair_s=1e-3, steps=10)
    chosen = np.zeros(4, dtype=np.int64)
    cost.choose(window_WE, None, chosen, 1)
    assert chosen.tolist() == [0, 1, 2, 3]


def test_imbalance_of_servers_is_par() -> None:
    _, shares_SE = two_kinds()
    cost = ServerCost(shares_SE, fixed_s=0, load_s=0, pair_s=1, steps=1)
    assert cost.imbalance(np.array([3.0, 1, 0, 0, 0, 0, 0, 0])) == 1.5
    assert cost.imbalance(np.zeros(8)) == 1.0
    layers = ServerCost(np.stack([shares_SE, shares_SE]), fixed_s=0, load_s=0, pair_s=1, steps=1)
    assert layers.imbalance(np.array([3.0, 1, 0, 0, 0, 0, 0, 0] + 8 * [1.0])) == 1.25


@pytest.mark.parametrize(
    "change",
    [{"load_s": -1.0}, {"pair_s": -1.0}, {"fixed_s": -1.0}, {"steps": 0}, {"shares": 0.5}],
)
def test_an_invalid_cost_model_is_refused(change: dict[str, float]) -> None:
    given = {"fixed_s": 0.0, "load_s": 1.0, "pair_s": 1.0, "steps": 1, "shares": 1.0} | change
    with pytest.raises(ConfigError, match="cost model"):
        ServerCost(np.full((1, 3), given.pop("shares")), **given)  # type: ignore[arg-type]


@settings(deadline=None)
@given(clusters(), st.integers(1, 6), st.floats(0.5, 2))
def test_server_saving_is_a_share_of_a_better_orders_saving(
    drawn: tuple[ServerCost, np.ndarray], batch_size: int, bias: float
) -> None:
    cost, window_WE = drawn
    if len(window_WE) <= batch_size:
        return
    rest_WE = ahead_WE = window_WE[: 4 * batch_size]
    by_age_s = sum(
        cost.batch_s(ahead_WE[begin : begin + batch_size].sum(axis=0))
        for begin in range(0, len(ahead_WE), batch_size)
    )
    by_choice_s = 0.0
    while len(rest_WE):
        chosen = np.zeros(min(batch_size, len(rest_WE)), dtype=np.int64)
        by_choice_s += cost.choose(np.ascontiguousarray(rest_WE), None, chosen, 1)
        rest_WE = np.delete(rest_WE, chosen, axis=0)
    saved = cost.saving(window_WE, None, batch_size, bias)
    assert saved == pytest.approx(0.7 * (by_age_s / by_choice_s / bias - 1), abs=1e-4)


def test_imbalance_saving_is_a_share_of_the_next_batchs_saving() -> None:
    window_WE = np.zeros((8, 4))
    window_WE[:4, 0] = window_WE[4:, 1] = 10.0
    cost = ImbalanceCost(base_s=1.0, sensitivity=1.0)
    chosen = np.zeros(4, dtype=np.int64)
    free_s = cost.choose(window_WE, None, chosen, 1)
    oldest_s = cost.batch_s(window_WE[:4].sum(axis=0))
    assert free_s < oldest_s
    wanted = 0.7 * (oldest_s / (1.1 * free_s) - 1)
    assert cost.saving(window_WE, None, 4, 1.1) == pytest.approx(wanted)
