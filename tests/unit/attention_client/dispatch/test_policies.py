"""Dispatch policies: the replica of each chunk."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_client.dispatch import Load, dispatch_policy
from attention_client.dispatch.parts import CHUNK_PAIRS, NOWHERE, Chunks, group
from eaas.errors import ConfigError

POLICIES = ("least_loaded", "split", "weights", "round_robin", "random")


def chunks_of(experts: list[int], pairs: int = 1) -> Chunks:
    expert_C = np.array(experts, dtype=np.int64)
    of_TK = np.arange(expert_C.size, dtype=np.int32)[:, None]
    return Chunks(of_TK, expert_C, np.full(expert_C.size, 1 + pairs / CHUNK_PAIRS))


def idle(servers: int) -> Load:
    return Load(np.ones(servers), np.zeros(servers))


def ends_of(server_C: np.ndarray, chunks: Chunks, load: Load) -> np.ndarray:
    ends_S = load.backlog_S.copy()
    for server, work in zip(server_C, chunks.work_C, strict=True):
        ends_S[server] += load.rate_S[server] * work
    return ends_S


@st.composite
def situations(draw: st.DrawFn) -> tuple[Chunks, np.ndarray, Load]:
    servers, experts = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    holds_SE = rng.random((servers, experts)) < draw(st.floats(0.1, 1.0))
    shares_SE = np.where(holds_SE, rng.random((servers, experts)) + 0.01, 0).astype(np.float32)
    ids_TK = rng.integers(0, experts, (draw(st.integers(0, 40)), 2))
    chunks = group(ids_TK, np.ones(ids_TK.shape, dtype=bool), experts, 3)
    load = Load(rng.uniform(0.1, 10, servers), rng.uniform(0, 5, servers))
    return chunks, shares_SE, load


@pytest.mark.parametrize("name", POLICIES)
@settings(deadline=None)
@given(situations())
def test_a_chunk_goes_to_a_holder_of_its_expert(name: str, drawn) -> None:
    chunks, shares_SE, load = drawn
    backlog_S = load.backlog_S.copy()
    policy = dispatch_policy(name)
    for _ in range(3):
        server_C = policy.choose(chunks, shares_SE, load)
        assert server_C.shape == chunks.expert_C.shape
        for server, expert in zip(server_C, chunks.expert_C, strict=True):
            if (shares_SE[:, expert] > 0).any():
                assert shares_SE[server, expert] > 0
            else:
                assert server == NOWHERE
    assert (load.backlog_S == backlog_S).all()


@pytest.mark.parametrize("name", ["least_loaded", "weights"])
def test_shares_hold_over_many_calls(name: str) -> None:
    shares_SE = np.array([[0.5, 0.2], [0.5, 0.3], [0.0, 0.5]], dtype=np.float32)
    policy, counts_SE = dispatch_policy(name), np.zeros((3, 2))
    for call in range(2000):
        # One expert a call, on idle servers: there is nothing to level.
        chunks = chunks_of([call % 2])
        counts_SE[policy.choose(chunks, shares_SE, idle(3))[0], call % 2] += 1
    assert np.abs(counts_SE / 1000 - shares_SE).max() < 0.02


def test_shares_hold_within_a_call() -> None:
    shares_SE = np.repeat(np.array([[0.6], [0.3], [0.1]], dtype=np.float32), 200, axis=1)
    server_C = dispatch_policy("weights").choose(chunks_of([*range(200)]), shares_SE, idle(3))
    assert np.abs(np.bincount(server_C) / 200 - [0.6, 0.3, 0.1]).max() < 0.02


@pytest.mark.parametrize("name", ["least_loaded", "split"])
@settings(deadline=None)
@given(situations())
def test_no_single_move_improves_a_levelled_choice(name: str, drawn) -> None:
    chunks, shares_SE, load = drawn
    server_C = dispatch_policy(name).choose(chunks, shares_SE, load)
    placed_C = np.flatnonzero(server_C != NOWHERE)
    if not placed_C.size:
        return
    used = Chunks(chunks.of_TK, chunks.expert_C[placed_C], chunks.work_C[placed_C])
    own_C = server_C[placed_C]
    ends_S = ends_of(own_C, used, load)
    last = max(set(own_C.tolist()), key=lambda s: ends_S[s])
    for c in np.flatnonzero(own_C == last):
        for other in np.flatnonzero(shares_SE[:, used.expert_C[c]] > 0):
            moved_C = own_C.copy()
            moved_C[c] = other
            moved_S = ends_of(moved_C, used, load)
            own_s = load.rate_S[last] * used.work_C[c]
            assert max(moved_S[last], moved_S[other]) >= ends_S[last] - 0.02 * own_s - 1e-9


def test_least_loaded_gives_a_server_of_half_the_speed_half_the_work() -> None:
    shares_SE = np.full((3, 60), 1 / 3, dtype=np.float32)
    load = Load(np.array([1.0, 2.0, 1.0]), np.zeros(3))
    chunks = chunks_of([*range(60)])
    ends_S = ends_of(dispatch_policy("least_loaded").choose(chunks, shares_SE, load), chunks, load)
    assert ends_S.max() / ends_S.min() < 1.1


def test_least_loaded_counts_work_in_flight() -> None:
    shares_SE = np.full((2, 8), 0.5, dtype=np.float32)
    load = Load(np.ones(2), np.array([100.0, 0.0]))
    server_C = dispatch_policy("least_loaded").choose(chunks_of([*range(8)]), shares_SE, load)
    assert (server_C == 1).all()


def test_split_moves_load_across_a_chain_of_servers() -> None:
    # Server i shares expert i only with server i + 1: load of the first server reaches the last only through
    # all others.
    servers = 8
    shares_SE = np.zeros((servers, servers - 1), dtype=np.float32)
    for expert in range(servers - 1):
        shares_SE[expert, expert] = shares_SE[expert + 1, expert] = 0.5
    chunks, load = chunks_of([0] * 30 + [e for e in range(1, 7) for _ in range(15)]), idle(servers)
    ends = {
        name: max(
            ends_of(dispatch_policy(name).choose(chunks, shares_SE, load), chunks, load).max()
            for _ in range(5)
        )
        for name in ("split", "least_loaded")
    }
    best = chunks.work_C.sum() / servers
    assert ends["split"] <= best * 1.1
    assert ends["split"] <= ends["least_loaded"]


def test_round_robin_takes_the_replicas_in_turn() -> None:
    shares_SE = np.array([[1], [0], [1], [1]], dtype=np.float32)
    policy = dispatch_policy("round_robin")
    turns = [int(policy.choose(chunks_of([0]), shares_SE, idle(4))[0]) for _ in range(6)]
    assert turns == [0, 2, 3, 0, 2, 3]


def test_few_pairs_of_an_expert_stay_together_and_many_spread() -> None:
    shares_SE = np.full((4, 1), 0.25, dtype=np.float32)

    def servers_used(tokens: int) -> int:
        ids_TK = np.zeros((tokens, 1), dtype=np.int64)
        chunks = group(ids_TK, ids_TK == 0, 1)
        return len(set(dispatch_policy("least_loaded").choose(chunks, shares_SE, idle(4))))

    assert servers_used(CHUNK_PAIRS) == 1
    assert servers_used(CHUNK_PAIRS * 8) == 4


def test_an_unknown_policy_error_lists_the_names() -> None:
    with pytest.raises(
        ConfigError, match=r"fastest.*least_loaded, split, weights, round_robin, random"
    ):
        dispatch_policy("fastest")


@pytest.mark.parametrize("name", ["weights", "round_robin"])
@pytest.mark.parametrize("layers", [1, 2, 3, 4, 8, 48])
def test_each_layer_follows_its_shares_for_any_number_of_layers(name: str, layers: int) -> None:
    """In 40 one-token calls per layer, each server gets its share to within two calls."""
    policy = dispatch_policy(name)
    part = 0.5 if name == "round_robin" else 0.3
    shares_SE = np.array([[part], [1 - part]], np.float32)
    first_L = np.zeros(layers)
    for call in range(40 * layers):
        layer = call % layers
        first_L[layer] += policy.choose(chunks_of([0]), shares_SE, idle(2), layer)[0] == 0
    assert (np.abs(first_L - 40 * part) <= 2).all(), first_L
