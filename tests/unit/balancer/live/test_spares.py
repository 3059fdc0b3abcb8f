"""The choice of spare replicas for a live cluster, and stages of a layout within memory."""

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from balancer.live.spares import choose, scenarios
from balancer.planner.layout import Situation
from balancer.planner.stages import stages
from balancer.policies.moves import ordered_moves
from eaas.minmax import levels
from eaas.spares import SpareReplicas

EPOCH = 3


def situation(seed: int, layers: int, servers: int, experts: int) -> Situation:
    """Each expert on one or two servers."""
    rng = np.random.default_rng(seed)
    rank_LSE = rng.random((layers, servers, experts)).argsort(1).argsort(1)
    holds_LSE = rank_LSE < rng.integers(1, 3, (layers, 1, experts))
    shares_LSE = holds_LSE / holds_LSE.sum(1, keepdims=True)
    return Situation(
        servers=tuple(f"s{number}" for number in range(servers)),
        holds_LSE=holds_LSE,
        shares_LSE=shares_LSE,
        load_LE=np.zeros((layers, experts)),
        speeds_S=np.ones(servers),
    )


def skewed(seed: int, now: Situation) -> np.ndarray:
    layers, _, experts = now.holds_LSE.shape
    return np.random.default_rng(seed).pareto(1.0, (4, layers, experts)) * 1000 + 1


@given(st.integers(0, 2**32), st.integers(1, 3), st.integers(2, 6), st.integers(2, 12))
def test_one_new_replica_a_server_and_layer(seed, layers, servers, experts) -> None:
    now = situation(seed, layers, servers, experts)
    load_BLE = skewed(seed, now)
    found = choose(now, load_BLE, SpareReplicas(EPOCH, {"gone": frozenset({(0, 0)})}), now.servers)
    assert found.epoch == EPOCH
    assert not found.of("gone")
    for s, server in enumerate(now.servers):
        places = sorted(found.of(server))
        assert len({layer for layer, _ in places}) == len(places)
        assert not any(now.holds_LSE[layer, s, expert] for layer, expert in places)
    # With them, the best division of no layer's mean load is worse.
    shares_LSE = now.shares_LSE.copy()
    for server, places in found.held.items():
        for layer, expert in places:
            shares_LSE[layer, now.servers.index(server), expert] = 1.0
    for layer in range(layers):
        mean_E = load_BLE[:, layer].mean(0)[None]
        before, after = levels(mean_E, now.shares_LSE[layer]), levels(mean_E, shares_LSE[layer])
        assert after[0] <= before[0] * (1 + 1e-9)


def test_the_choice_for_an_unchanged_load_stays() -> None:
    now = situation(1, 2, 4, 16)
    load_BLE = skewed(1, now)[:1].repeat(4, axis=0)
    first = choose(now, load_BLE, SpareReplicas(EPOCH), now.servers)
    assert len(first) > 0
    assert choose(now, load_BLE, first, now.servers) == first


def test_a_server_without_memory_for_every_layer_has_no_slots() -> None:
    now = situation(2, 3, 4, 16)
    count_S = now.holds_LSE.sum((0, 2))
    room_S = np.array([2, 3, 0, 9])
    limited = replace(now, capacity_S=count_S + room_S)
    held = SpareReplicas(EPOCH, {"s0": frozenset({(0, 1)})})
    found = choose(limited, skewed(2, now), held, now.servers)
    assert set(found.held) == {"s1", "s3"}
    assert set(choose(limited, skewed(2, now), held, {"s1"}).held) == {"s1"}


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=40), st.integers(1, 4))
def test_scenarios_join_small_steps(tokens: list[int], servers: int) -> None:
    """Each has 400 tokens a server and layer, and all are of the last steps."""
    steps_WLE = np.array(tokens)[:, None, None] * np.array([[[1, 0], [0, 1]]])
    found = scenarios(steps_WLE, servers)
    assert found.shape[1:] == (2, 2)
    assert len(found) <= 8
    assert (found.sum((1, 2)) >= 2 * 400 * servers).all()
    total = found.sum()
    lasts = np.cumsum(np.array(tokens)[::-1]) * 2
    assert total == 0 or total in lasts
    if not len(found):
        assert 2 * sum(tokens) < 2 * 400 * servers


L, S, E = 2, 3, 6


def layout(rng: np.random.Generator, spare: int) -> np.ndarray:
    """Each expert on one server, some on more; each server holds E / S + spare of a layer at most."""
    holds_LSE = np.zeros((L, S, E), bool)
    for layer in range(L):
        for place, expert in enumerate(rng.permutation(E)):
            holds_LSE[layer, place % S, expert] = True
        for _ in range(spare):
            free = np.argwhere(~holds_LSE[layer])
            s, e = free[rng.integers(len(free))]
            if holds_LSE[layer, s].sum() < E // S + spare:
                holds_LSE[layer, s, e] = True
    return holds_LSE


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32), spare=st.integers(0, 2), more=st.integers(0, 2))
def test_every_stage_fits_and_covers(seed: int, spare: int, more: int) -> None:
    rng = np.random.default_rng(seed)
    now, then = layout(rng, spare), layout(rng, spare)
    shares, then_shares = (h / h.sum(axis=1, keepdims=True) for h in (now, then))
    cap = E // S + spare + more
    capacity_S = np.full(S, L * cap)
    moves = ordered_moves(now, then, np.full((L, S), cap))
    found = stages(now, shares, then, then_shares, moves, capacity_S)
    assert (found[-1][0] == then).all()
    before = now
    for holds, share in found:
        assert holds.any(axis=1).all()
        assert ((share > 0) == holds).all()
        assert np.allclose(share.sum(axis=1), 1)
        peak_S = (before | holds).sum(axis=(0, 2))
        # One too many where experts are exchanged without a free slot (see `ordered_moves`).
        assert (peak_S <= capacity_S + (L if cap == E // S + spare else 0)).all()
        before = holds
    assert stages(now, shares, then, then_shares, moves, None)[0][0] is then
