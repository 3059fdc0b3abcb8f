"""Sparse replicas of dense shares."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from attention_client.dispatch import ReplicaShares


@given(
    st.integers(1, 3), st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**32), st.booleans()
)
def test_they_are_the_shares_of_usable_servers(
    layers: int, servers: int, experts: int, seed: int, all_usable: bool
) -> None:
    rng = np.random.default_rng(seed)
    is_held_LSE = rng.random((layers, servers, experts)) < rng.random()
    shares_LSE = np.where(is_held_LSE, rng.random(is_held_LSE.shape), 0).astype(np.float32)
    usable_S = np.ones(servers, np.bool_) if all_usable else rng.random(servers) < 0.5
    replicas = ReplicaShares.of(shares_LSE)
    if not all_usable:
        replicas = replicas.on(usable_S)
    assert not replicas.server_N.flags.writeable
    assert (replicas.servers, replicas.experts) == (servers, experts)
    again_LSE = np.zeros_like(shares_LSE)
    for layer, first_X in enumerate(replicas.first_LX):
        for expert in range(experts):
            here = slice(first_X[expert], first_X[expert + 1])
            assert (np.diff(replicas.server_N[here]) > 0).all()
            again_LSE[layer, replicas.server_N[here], expert] = replicas.share_N[here]
    assert (again_LSE == shares_LSE * usable_S[None, :, None]).all()
    assert len(replicas.server_N) == len(replicas.share_N) == np.count_nonzero(again_LSE)


@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 6), st.integers(0, 2**32))
def test_more_replicas_are_beside_the_shares(
    layers: int, servers: int, experts: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    shape = layers, servers, experts
    shares_LSE = np.where(rng.random(shape) < 0.5, rng.random(shape), 0).astype(np.float32)
    more_LSE = rng.random(shape) < rng.random()
    layer_M, server_M, expert_M = np.nonzero(more_LSE)
    found = ReplicaShares.of(shares_LSE).plus(layer_M, server_M, expert_M)
    count_LE = np.maximum((shares_LSE > 0).sum(1, keepdims=True), 1)
    new_LSE = more_LSE & (shares_LSE == 0)
    expected = ReplicaShares.of(np.where(new_LSE, 1 / count_LE, shares_LSE).astype(np.float32))
    for name in ("first_LX", "server_N", "share_N"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype
        assert (ours == theirs).all()
        assert not ours.flags.writeable
