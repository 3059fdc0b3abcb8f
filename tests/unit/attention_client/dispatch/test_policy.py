"""The dispatch policy: the compiled plan against a slow form of its steps, and what the plan achieves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from attention_client.dispatch import (
    DispatchPolicy,
    Load,
    _dispatch,
    dispatch_policy,
)
from attention_client.dispatch.parts import LOAD_PAIRS, Part, pairs_of, without
from eaas.errors import ConfigError
from eaas.minmax import levels
from eaas.replicas import Replicas

ROOM = 100_000
CHUNK_PAIRS = int(LOAD_PAIRS)
# Roberts' R2 sequence: powers of the plastic number.
CALL_STEP, CHUNK_STEP = 0.7548776662466927, 0.5698402909980532


def idle(servers: int) -> Load:
    return Load(np.ones(servers), np.zeros(servers))


def of(shares_SE: np.ndarray, layer: int = 0) -> Replicas:
    """Replicas of so many layers and one, all alike."""
    shares_LSE = np.broadcast_to(shares_SE, (layer + 1, *shares_SE.shape))
    return Replicas.of(shares_LSE > 0, shares_LSE)


def plan(
    policy: DispatchPolicy,
    ids: list[int],
    shares_SE: np.ndarray,
    load: Load | None = None,
    layer: int = 0,
) -> list[Part]:
    """Parts of one-expert tokens."""
    ids_TK = np.array(ids)[:, None]
    parts, _ = policy.plan(
        ids_TK, ids_TK >= 0, of(shares_SE, layer), load or idle(len(shares_SE)),
        [ROOM] * len(shares_SE), layer,
    )  # fmt: skip
    return parts


@st.composite
def situations(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, np.ndarray, Load, list[int]]:
    servers, experts = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    tokens, top_k = draw(st.integers(0, 40)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    holds_SE = rng.random((servers, experts)) < draw(st.floats(0, 1))
    shares_SE = np.where(holds_SE, rng.random((servers, experts)), 0).astype(np.float32)
    ids_TK = rng.integers(0, experts, (tokens, top_k))
    # Enough pairs of one expert for several chunks.
    ids_TK[rng.random(tokens) < draw(st.sampled_from((0.0, 0.9)))] = 0
    wanted_TK = rng.random(ids_TK.shape) < draw(st.sampled_from((0.3, 1.0)))
    load = Load(rng.uniform(0.1, 10, servers), rng.uniform(0, 5, servers))
    return ids_TK, wanted_TK, shares_SE, load, [draw(st.integers(1, 50)) for _ in range(servers)]


def slow_chunks(ids_TK: np.ndarray, wanted_TK: np.ndarray) -> list[tuple[int, list[tuple]]]:
    """(expert, pairs) of each chunk: even, by ascending expert."""
    chunks = []
    for expert in np.unique(ids_TK[wanted_TK]):
        pairs = [tuple(pair) for pair in np.argwhere(wanted_TK & (ids_TK == expert))]
        count = -(-len(pairs) // CHUNK_PAIRS)
        bounds = [-(-i * len(pairs) // count) for i in range(count + 1)]
        chunks += [(int(expert), pairs[a:b]) for a, b in itertools.pairwise(bounds)]
    return chunks


def slow_servers(chunks: list, shares_SE: np.ndarray, draw: float) -> list[int | None]:
    """The server of each chunk, by the shares alone."""
    server_C: list[int | None] = []
    for expert, _ in chunks:
        drawn = sum(server is not None for server in server_C)
        here = (draw + drawn * CHUNK_STEP) % 1.0
        sum_S = np.cumsum(shares_SE[:, expert].astype(np.float64))
        holders = np.flatnonzero(shares_SE[:, expert])
        beyond = [s for s in holders if sum_S[s] > here * sum_S[-1]]
        server_C.append(int((beyond or holders[-1:])[0]) if holders.size else None)
    return server_C


@given(drawn=situations())
def test_a_plan_by_shares_equals_its_steps(drawn) -> None:
    ids_TK, wanted_TK, shares_SE, load, room = drawn
    policy = dispatch_policy("weights")
    backlog_S = load.backlog_S.copy()
    chunks = slow_chunks(ids_TK, wanted_TK)
    for call in range(3):
        parts, complete = policy.plan(ids_TK, wanted_TK, of(shares_SE), load, room)
        server_C = slow_servers(chunks, shares_SE, call * CALL_STEP % 1.0)
        assert complete == (None not in server_C)
        server_TK = np.full(ids_TK.shape, -1)
        pairs_SE = np.zeros(shares_SE.shape)
        for (expert, pairs), server in zip(chunks, server_C, strict=True):
            if server is not None:
                pairs_SE[server, expert] += len(pairs)
        # Each replica gets the next pairs of its expert, the first server's first.
        for expert in range(shares_SE.shape[1]):
            places = np.argwhere(wanted_TK & (ids_TK == expert))
            servers = np.repeat(np.arange(len(shares_SE)), pairs_SE[:, expert].astype(int))
            for place, server in zip(places, servers, strict=False):
                server_TK[tuple(place)] = server
        work_S = (pairs_SE > 0).sum(axis=1) + pairs_SE.sum(axis=1) / LOAD_PAIRS
        for server, size in enumerate(room):
            own = [part for part in parts if part.server == server]
            assert sum(part.work for part in own) == pytest.approx(work_S[server])
            rows = [part.rows_R.size for part in own]
            assert all(n == size for n in rows[:-1])
            assert all(0 < n <= size for n in rows)
            rows_R = np.flatnonzero((server_TK == server).any(axis=1))
            assert [t for part in own for t in part.rows_R] == rows_R.tolist()
            ids_RK = np.where(server_TK == server, ids_TK, -1)[rows_R]
            assert [ids for part in own for ids in part.ids_RK.tolist()] == ids_RK.tolist()
        assert [p.server for p in parts] == sorted(p.server for p in parts)
    assert (load.backlog_S == backlog_S).all()


@given(situations())
def test_parts_hold_each_pair_once_and_without_the_rest(drawn) -> None:
    ids_TK, wanted_TK, shares_SE, load, room = drawn
    parts, complete = dispatch_policy("least_loaded").plan(
        ids_TK, wanted_TK, of(shares_SE), load, room
    )
    seen_TK = np.zeros(ids_TK.shape, dtype=int)
    for part in parts:
        assert 0 < part.rows_R.size <= room[part.server]
        assert part.pairs_RK.any(axis=1).all()
        assert (shares_SE[part.server, part.ids_RK[part.pairs_RK]] > 0).all()
        assert (pairs_of(part, ids_TK.shape)[part.rows_R] == part.pairs_RK).all()
        seen_TK += pairs_of(part, ids_TK.shape)
    held_TK = (shares_SE > 0).any(axis=0)[ids_TK]
    assert (seen_TK == (wanted_TK & held_TK)).all()
    tokens = [(part.server, int(t)) for part in parts for t in part.rows_R]
    assert tokens == sorted(set(tokens))
    left_TK = without(wanted_TK, parts)
    if left_TK is None:
        left_TK = np.zeros_like(wanted_TK)
    assert (left_TK == (wanted_TK & ~held_TK)).all()
    assert complete == (not left_TK.any())


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 8, 48])
@pytest.mark.parametrize("name", ["least_loaded", "weights"])
def test_each_layer_follows_its_shares_for_any_number_of_layers(name: str, layers: int) -> None:
    """In 40 calls per layer, each of a token on idle servers, a server gets its share to within two calls."""
    policy = dispatch_policy(name)
    shares_SE = np.array([[0.3], [0.7]], np.float32)
    first_L = np.zeros(layers)
    for call in range(40 * layers):
        layer = call % layers
        first_L[layer] += plan(policy, [0], shares_SE, layer=layer)[0].server == 0
    assert (np.abs(first_L - 40 * 0.3) <= 2).all(), first_L


def ends_of(parts: list[Part], load: Load) -> float:
    """When the last of the asked servers ends."""
    work_S: dict[int, float] = {}
    for part in parts:
        work_S[part.server] = work_S.get(part.server, 0.0) + part.work
    return max(load.backlog_S[s] + load.rate_S[s] * work for s, work in work_S.items())


def test_load_moves_across_a_chain_of_servers() -> None:
    # Server i shares expert i only with server i + 1: load of the first server reaches the last only through
    # all others.
    servers = 8
    shares_SE = np.zeros((servers, servers - 1), dtype=np.float32)
    for expert in range(servers - 1):
        shares_SE[expert, expert] = shares_SE[expert + 1, expert] = 0.5
    ids = [0] * 3000 + [e for e in range(1, 7) for _ in range(1500)]
    load = Load(np.ones(servers), np.zeros(servers), load_pairs=0.1)
    for _ in range(5):
        parts = plan(dispatch_policy("least_loaded"), ids, shares_SE, load)
        assert ends_of(parts, load) <= (len(ids) / 0.1 + 14) / servers * 1.02


def least_end(pairs_E: np.ndarray, holds_SE: np.ndarray, load: Load) -> float:
    """The end of the best possible call, by mixed-integer programming.

    Variables: the end; pairs n_SE; y_SE, whether a server reads an expert; z_S, whether it is asked.
    """
    servers, experts = holds_SE.shape
    cells = servers * experts
    n_SE = 1 + np.arange(cells).reshape(holds_SE.shape)
    y_SE, z_S = n_SE + cells, 1 + 2 * cells + np.arange(servers)
    size = 1 + 2 * cells + servers
    rows, low, high = [], [], []

    def add(entries: dict[int, float], least: float, most: float) -> None:
        row = np.zeros(size)
        row[list(entries)] = list(entries.values())
        rows.append(row)
        low.append(least)
        high.append(most)

    for e in range(experts):
        add(dict.fromkeys(n_SE[:, e], 1.0), pairs_E[e], pairs_E[e])
    for s in range(servers):
        for e in range(experts):
            add({n_SE[s, e]: 1, y_SE[s, e]: -pairs_E[e]}, -np.inf, 0)
            add({y_SE[s, e]: 1, z_S[s]: -1}, -np.inf, 0)
        spent = {0: 1.0, z_S[s]: -load.backlog_S[s]}
        for e in range(experts):
            spent |= {y_SE[s, e]: -load.rate_S[s], n_SE[s, e]: -load.rate_S[s] / load.load_pairs}
        add(spent, 0, np.inf)
    most = np.concatenate([[1e6], (holds_SE * pairs_E).ravel(), holds_SE.ravel(), np.ones(servers)])
    found = milp(
        np.eye(size)[0],
        constraints=LinearConstraint(np.array(rows), low, high),
        bounds=Bounds(np.zeros(size), most),
        integrality=np.arange(size) > 0,
        options={"mip_rel_gap": 1e-6},
    )
    assert found.success
    return float(found.fun)


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in (1, 2, 3))]
)
def test_small_calls_end_nearly_as_soon_as_any_could(seed: int) -> None:
    """Within 1 % in all but a few, and within 5 % in each."""
    rng = np.random.default_rng(seed)
    over = []
    for _ in range(50):
        servers, experts = int(rng.integers(2, 6)), int(rng.integers(1, 8))
        holds_SE = rng.random((servers, experts)) < rng.choice([0.4, 0.7])
        holds_SE[rng.integers(0, servers, experts), np.arange(experts)] = True
        pairs_E = rng.integers(0, rng.choice([3, 20, 60]), experts)
        pairs_E[0] += 1
        load = Load(
            rng.choice([1.0, 1.5, 3.0], servers),
            rng.uniform(0, 5, servers) * rng.integers(0, 2),
            float(rng.choice([1, 4, 16, 64])),
        )
        ids = np.repeat(np.arange(experts), pairs_E).tolist()
        shares_SE = (holds_SE / holds_SE.sum(axis=0)).astype(np.float32)
        parts = plan(dispatch_policy("least_loaded"), ids, shares_SE, load)
        over.append(ends_of(parts, load) / least_end(pairs_E, holds_SE, load) - 1)
    assert min(over) > -1e-9
    assert max(over) < 0.05
    assert np.mean(np.array(over) > 0.01) <= 0.04


def test_pairs_are_even_where_loads_cost_nothing_and_experts_are_few_where_pairs_do() -> None:
    """64 servers, 256 experts, one redundant expert for each server; 1,024 and 64 tokens of 8 experts."""
    rng = np.random.default_rng(3)
    popularity_E = rng.dirichlet(np.full(256, 0.6))
    holds_SE = np.zeros((64, 256), bool)
    holds_SE[np.arange(256) % 64, rng.permutation(256)] = True
    for s, expert in enumerate(np.argsort(-popularity_E)[:32].repeat(2)):
        holds_SE[(7 * s + 3) % 64, expert] = True
    shares_SE = (holds_SE / holds_SE.sum(axis=0)).astype(np.float32)
    for tokens, load_pairs in ((1024, 1e-3), (64, 1e9)):
        pairs_E = rng.multinomial(8 * tokens, popularity_E)
        work_E = pairs_E.astype(float) if load_pairs < 1 else (pairs_E > 0).astype(float)
        least = float(levels(work_E[None], shares_SE)[0])
        ids = np.repeat(np.arange(256), pairs_E).tolist()
        load = Load(np.ones(64), np.zeros(64), load_pairs)
        parts = plan(dispatch_policy("least_loaded"), ids, shares_SE, load)
        if load_pairs < 1:
            assert max(part.rows_R.size for part in parts) <= 1.01 * least + 1
        else:
            # As many experts on the busiest server as any division must have.
            assert max(len(set(part.ids_RK.ravel())) for part in parts) == np.ceil(least - 1e-9)


def test_an_unknown_policy_error_lists_the_names() -> None:
    with pytest.raises(ConfigError, match=r"round_robin.*least_loaded or weights"):
        dispatch_policy("round_robin")


@pytest.mark.parametrize("expert", [-1, 4, 2**40])
@pytest.mark.parametrize("name", ["least_loaded", "weights"])
def test_an_unknown_expert_is_refused(name: str, expert: int) -> None:
    ids_TK, wanted_TK = np.array([[0, expert]]), np.ones((1, 2), dtype=bool)
    shares_SE = np.ones((1, 4), dtype=np.float32)
    with pytest.raises(IndexError, match=f"expert {expert} of 4"):
        dispatch_policy(name).plan(ids_TK, wanted_TK, of(shares_SE), idle(1), [8])
    wanted_TK[0, 1] = False
    parts, complete = dispatch_policy(name).plan(ids_TK, wanted_TK, of(shares_SE), idle(1), [8])
    assert complete
    assert parts[0].ids_RK.tolist() == [[0, -1]]


I64, I32, F32 = np.int64, np.int32, np.float32


def test_the_compiled_plan_checks_its_arguments() -> None:
    right = {
        "ids": np.zeros((2, 2), I64), "wanted": np.ones((2, 2), bool), "tokens": 2, "top_k": 2,
        "firsts": np.array([0, 1], I32), "held_by": np.zeros(1, I32),
        "shares": np.ones(1, F32), "servers": 1, "experts": 1, "load_pairs": 64.0,
        "call": 0, "layer": 0, "rate": np.ones(1), "backlog": np.zeros(1),
        "rows_out": np.zeros(2, I64), "ids_out": np.zeros((2, 2), I32),
    }  # fmt: skip
    assert _dispatch.plan(*right.values()) == (0, [(0, 2, 1 + 4 / 64)])
    assert right["rows_out"].tolist() == [0, 1]
    for wrong in (
        {"tokens": 3}, {"tokens": -1}, {"top_k": 2**40}, {"servers": 2}, {"servers": -1},
        {"servers": 2**40}, {"experts": 2**61}, {"load_pairs": 1e12},
        {"firsts": np.array([-1, 1], I32)}, {"firsts": np.array([0, 2], I32)},
        {"firsts": np.array([1, 0], I32)}, {"firsts": np.array([0], I32)},
        {"held_by": np.ones(1, I32)}, {"held_by": -np.ones(1, I32)}, {"held_by": np.zeros(2, I32)},
        {"firsts": np.array([0, 2], I32), "held_by": np.zeros(2, I32), "shares": np.ones(2, F32)},
        {"experts": 2}, {"experts": 0}, {"load_pairs": 0.0}, {"call": 2**41}, {"layer": 2**31},
        {"rate": None}, {"rate": np.ones(1, F32)}, {"backlog": np.ones(0)},
        {"ids": np.zeros((2, 2), I32)}, {"wanted": np.ones(3, bool)}, {"shares": np.ones(1)},
        {"load_pairs": np.nan}, {"rows_out": np.zeros(1, I64)}, {"ids_out": np.zeros((2, 1), I32)},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"out of range|bytes in items"):
            _dispatch.plan(*(right | wrong).values())


@pytest.mark.parametrize(("unit_s", "servers"), [(15e-6, 2), (1e-3, 3)])
def test_a_small_call_asks_fewer_servers_and_a_large_one_all(unit_s: float, servers: int) -> None:
    """Six experts, each on two of three servers: two requests cost less than a third of the work saves."""
    shares_SE = (
        np.array([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 1, 1], [0, 0, 1, 1, 1, 1]], np.float32) / 2
    )
    load = Load(np.full(3, unit_s), np.zeros(3))
    policy = dispatch_policy("least_loaded")
    asked = [0, 0, 0]
    for _ in range(90):
        parts, _ = policy.plan(
            np.arange(6)[None, :], np.ones((1, 6), bool), of(shares_SE), load, [ROOM] * 3
        )
        assert len(parts) == servers
        for part in parts:
            asked[part.server] += 1
    # No server is left out for good.
    assert min(asked) > 40
