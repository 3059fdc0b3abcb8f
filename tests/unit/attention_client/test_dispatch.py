import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from attention_client.dispatch import NOWHERE, assign, cumulative_shares, split


@st.composite
def routings(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, float]:
    servers, experts = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    tokens, top_k = draw(st.integers(0, 40)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    holds_SE = rng.random((servers, experts)) < draw(st.floats(0.1, 1.0))
    shares_SE = np.where(holds_SE, rng.random((servers, experts)) + 0.01, 0).astype(np.float32)
    usable_S = rng.random(servers) < draw(st.floats(0.3, 1.0))
    ids_TK = rng.integers(0, experts, (tokens, top_k))
    wanted_TK = rng.random((tokens, top_k)) < draw(st.floats(0.2, 1.0))
    return shares_SE, usable_S, ids_TK, wanted_TK, draw(st.floats(0, 1, exclude_max=True))


@given(routings(), st.integers(1, 8))
def test_every_wanted_pair_goes_to_a_usable_holder(routing, pairs_per_replica) -> None:
    shares_SE, usable_S, ids_TK, wanted_TK, phase = routing
    cumulative_SE = cumulative_shares(shares_SE, usable_S)
    server_TK = assign(ids_TK, wanted_TK, cumulative_SE, phase, pairs_per_replica)
    for (t, k), server in np.ndenumerate(server_TK):
        expert = ids_TK[t, k]
        reachable = bool((shares_SE[:, expert] > 0)[usable_S].any())
        if wanted_TK[t, k] and reachable:
            assert usable_S[server]
            assert shares_SE[server, expert] > 0
        else:
            assert server == NOWHERE


@given(routings(), st.integers(1, 5))
def test_parts_hold_each_pair_once_and_no_token_twice(routing, room) -> None:
    shares_SE, usable_S, ids_TK, wanted_TK, phase = routing
    server_TK = assign(ids_TK, wanted_TK, cumulative_shares(shares_SE, usable_S), phase)
    parts = split(server_TK, dict.fromkeys(range(len(usable_S)), room))
    seen_TK = np.zeros(ids_TK.shape, dtype=int)
    for part in parts:
        assert 0 < part.rows_R.size <= room
        assert part.pairs_RK.any(axis=1).all()
        assert (server_TK[part.rows_R][part.pairs_RK] == part.server).all()
        seen_TK[part.rows_R] += part.pairs_RK
    assert (seen_TK == (server_TK != NOWHERE)).all()
    tokens = [(part.server, int(t)) for part in parts for t in part.rows_R]
    assert len(tokens) == len(set(tokens))


def test_shares_hold_over_many_calls() -> None:
    shares_SE = np.array([[0.5, 0.2], [0.5, 0.3], [0.0, 0.5]], dtype=np.float32)
    cumulative_SE = cumulative_shares(shares_SE, np.ones(3, dtype=bool))
    ids_TK = np.array([[0, 1]])
    counts_SE = np.zeros((3, 2))
    for call in range(2000):
        server_TK = assign(
            ids_TK, np.ones((1, 2), dtype=bool), cumulative_SE, (call * 0.618034) % 1
        )
        counts_SE[server_TK[0], [0, 1]] += 1
    assert np.abs(counts_SE / 2000 - shares_SE).max() < 0.01


def test_few_pairs_of_an_expert_stay_together_and_many_are_spread() -> None:
    shares_SE = np.full((4, 1), 0.25, dtype=np.float32)
    cumulative_SE = cumulative_shares(shares_SE, np.ones(4, dtype=bool))

    def servers_used(tokens: int) -> int:
        ids_TK = np.zeros((tokens, 1), dtype=np.int64)
        return len(np.unique(assign(ids_TK, ids_TK == 0, cumulative_SE, 0.3, pairs_per_replica=64)))

    assert servers_used(64) == 1
    assert servers_used(64 * 8) == 4
