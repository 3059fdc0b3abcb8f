"""Sparse replicas say what dense arrays say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eaas.replicas import Replicas

SHAPES = st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 6))
SEEDS = st.integers(0, 2**32)


def dense(shape: tuple[int, int, int], seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Holds and shares; a tenth of the replicas has no share."""
    rng = np.random.default_rng(seed)
    holds_LSE = rng.random(shape) < rng.random()
    shares_LSE = np.where(holds_LSE & (rng.random(shape) < 0.9), rng.random(shape), 0)
    return holds_LSE, shares_LSE.astype(np.float32)


def usable(servers: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed + 1).random(servers) < 0.6


def check(replicas: Replicas, holds_LSE: np.ndarray, shares_LSE: np.ndarray) -> None:
    """Compare each expert's replicas with the arrays."""
    layers, servers, experts = holds_LSE.shape
    assert (replicas.layers, replicas.servers, replicas.experts) == (layers, servers, experts)
    assert len(replicas) == np.count_nonzero(holds_LSE)
    for array, dtype in (
        (replicas.first_LX, np.int32),
        (replicas.server_N, np.int32),
        (replicas.share_N, np.float32),
    ):
        assert array.dtype == dtype
        assert not array.flags.writeable
    for layer, first_X in enumerate(replicas.first_LX):
        for expert in range(experts):
            here = slice(first_X[expert], first_X[expert + 1])
            server_R = np.flatnonzero(holds_LSE[layer, :, expert])
            assert replicas.server_N[here].tolist() == server_R.tolist()
            assert (replicas.share_N[here] == shares_LSE[layer, server_R, expert]).all()


@given(SHAPES, SEEDS)
def test_arrays_there_and_back(shape: tuple[int, int, int], seed: int) -> None:
    holds_LSE, shares_LSE = dense(shape, seed)
    replicas = Replicas.of(holds_LSE, shares_LSE)
    check(replicas, holds_LSE, shares_LSE)
    again = replicas.dense()
    assert [array.dtype for array in again] == [np.bool_, np.float32]
    np.testing.assert_array_equal(again[0], holds_LSE)
    np.testing.assert_array_equal(again[1], shares_LSE)
    for layer in range(shape[0]):
        np.testing.assert_array_equal(replicas.layer(layer)[1], shares_LSE[layer])


@given(SHAPES, SEEDS)
def test_a_list_in_any_order(shape: tuple[int, int, int], seed: int) -> None:
    holds_LSE, shares_LSE = dense(shape, seed)
    layer_N, server_N, expert_N = np.nonzero(holds_LSE)
    order_N = np.random.default_rng(seed).permutation(len(layer_N))
    place = layer_N[order_N], server_N[order_N], expert_N[order_N]
    check(Replicas.of_list(shape, *place, shares_LSE[place]), holds_LSE, shares_LSE)


def test_a_server_has_an_expert_once() -> None:
    two = np.zeros(2, np.int64)
    with pytest.raises(ValueError, match="server 0 has expert 0 of layer 0 twice"):
        Replicas.of_list((1, 1, 1), two, two, two, two.astype(np.float32))


@given(SHAPES, SEEDS)
def test_selections(shape: tuple[int, int, int], seed: int) -> None:
    holds_LSE, shares_LSE = dense(shape, seed)
    on_S = usable(shape[1], seed)
    replicas = Replicas.of(holds_LSE, shares_LSE)
    check(replicas.on(on_S), holds_LSE & on_S[:, None], shares_LSE)
    check(replicas.used(), shares_LSE > 0, shares_LSE)
    np.testing.assert_array_equal(replicas.count_LE(on_S), holds_LSE[:, on_S].sum(axis=1))


@given(SHAPES, SEEDS)
def test_more_replicas_have_even_shares(shape: tuple[int, int, int], seed: int) -> None:
    holds_LSE, shares_LSE = dense(shape, seed)
    more_LSE = np.random.default_rng(seed + 2).random(shape) < 0.3
    found = Replicas.of(holds_LSE, shares_LSE).plus(*np.nonzero(more_LSE))
    count_LE = np.maximum(holds_LSE.sum(axis=1, keepdims=True), 1)
    new_LSE = more_LSE & ~holds_LSE
    expected_LSE = np.where(new_LSE, 1 / count_LE, shares_LSE).astype(np.float32)
    check(found, holds_LSE | more_LSE, expected_LSE)


@given(SHAPES, SEEDS)
def test_groups_of_servers(shape: tuple[int, int, int], seed: int) -> None:
    holds_LSE, shares_LSE = dense(shape, seed)
    on_S = usable(shape[1], seed)
    group_S = np.random.default_rng(seed + 3).integers(0, 3, shape[1])
    found_LE = Replicas.of(holds_LSE, shares_LSE).groups_LE(group_S, on_S)
    expected_LE = np.zeros((shape[0], shape[2]), np.int64)
    for group in range(3):
        expected_LE += holds_LSE[:, on_S & (group_S == group)].any(axis=1)
    np.testing.assert_array_equal(found_LE, expected_LE)


@given(SHAPES, SEEDS)
def test_a_servers_part(shape: tuple[int, int, int], seed: int) -> None:
    holds_LSE, shares_LSE = dense(shape, seed)
    replicas = Replicas.of(holds_LSE, shares_LSE)
    for server in range(shape[1]):
        for layer, (experts, shares) in enumerate(replicas.of_server(server)):
            expert_R = np.flatnonzero(holds_LSE[layer, server])
            assert experts == expert_R.tolist()
            assert shares == shares_LSE[layer, server, expert_R].tolist()
