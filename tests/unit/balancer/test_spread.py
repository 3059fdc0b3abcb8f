"""Properties of the spread policy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from balancer.policies import compiled
from balancer.policies.spread import spread


@st.composite
def arguments(draw: st.DrawFn) -> tuple[int, int, int, int]:
    servers = draw(st.integers(1, 9))
    return (
        draw(st.integers(1, 6)),
        draw(st.integers(1, 40)),
        servers,
        draw(st.integers(1, servers)),
    )


@given(arguments())
@settings(deadline=None, max_examples=150)
def test_every_expert_is_on_as_many_servers_as_asked_and_loads_are_level(
    args: tuple[int, int, int, int],
) -> None:
    num_layers, num_experts, servers, redundancy = args
    holds_LSE, shares_LSE = spread(*args)
    assert holds_LSE.shape == shares_LSE.shape == (num_layers, servers, num_experts)
    assert (holds_LSE.dtype, shares_LSE.dtype) == (np.bool_, np.float32)
    assert (holds_LSE.sum(axis=1) == redundancy).all()
    count_LS = holds_LSE.sum(axis=2)
    assert (count_LS.max(axis=1) - count_LS.min(axis=1) <= 1).all()
    assert (shares_LSE[holds_LSE] == np.float32(1 / redundancy)).all()
    assert (shares_LSE[~holds_LSE] == 0).all()
    np.testing.assert_allclose(shares_LSE.sum(axis=1), 1, rtol=1e-6)


@given(arguments())
@settings(deadline=None, max_examples=30)
def test_the_same_arguments_give_the_same_placement(args: tuple[int, int, int, int]) -> None:
    for first, second in zip(spread(*args), spread(*args), strict=True):
        assert (first == second).all()


@given(arguments())
@example((5, 34, 9, 3))  # Sharing alone would put one server ahead.
@settings(deadline=None, max_examples=60)
def test_totals_over_the_layers_are_level(args: tuple[int, int, int, int]) -> None:
    holds_LSE, _ = spread(*args)
    total_S = holds_LSE.sum(axis=(0, 2))
    # The layers alone would allow a difference of 1 in each.
    assert total_S.max() - total_S.min() <= 2


@pytest.mark.parametrize(
    ("num_layers", "num_experts", "servers", "redundancy"),
    [(4, 8, 3, 2), (4, 8, 4, 2), (16, 64, 5, 2), (24, 60, 7, 2), (16, 64, 6, 3), (8, 256, 8, 2)],
)
def test_the_load_of_a_lost_server_falls_on_all_others_alike(
    num_layers: int, num_experts: int, servers: int, redundancy: int
) -> None:
    holds_LSE, _ = spread(num_layers, num_experts, servers, redundancy)
    held_LSE = holds_LSE.astype(np.int64)
    shared_SS = np.einsum("lse,lte->st", held_LSE, held_LSE)
    for lost in range(servers):
        others_S = np.delete(shared_SS[lost], lost)
        assert others_S.min() > 0
        assert others_S.max() - others_S.min() <= max(3, 0.1 * others_S.mean())


def plain_spread(count_LE: np.ndarray, slots: int, servers: int) -> list[list[int]]:
    """Servers of each layer's replicas, by expert: the rule of `spread.c`, with loops."""
    total_S, pairs_SS = np.zeros(servers, int), np.zeros((servers, servers), int)
    placed = []
    for layer, count_E in enumerate(count_LE):
        left_S, is_open_S = np.full(servers, slots), np.zeros(servers, bool)
        row: list[int] = []
        for count in count_E:
            has: list[int] = []
            for _ in range(count):
                if not is_open_S.any():
                    is_open_S = left_S == max(1, left_S.max())
                able = [s for s in np.flatnonzero(is_open_S) if s not in has]
                able = [s for s in able if total_S[s] <= total_S.min() + 1] or able
                if not able:
                    able = [s for s in range(servers) if s not in has and left_S[s] > 0]
                    best = max(able, key=lambda s: left_S[s])
                else:
                    turn = layer % servers
                    best = min(
                        able,
                        key=lambda s: (pairs_SS[s, has].sum(), total_S[s], (s - turn) % servers),
                    )
                has.append(int(best))
                left_S[best] -= 1
                is_open_S[best] = False
            pairs_SS[np.ix_(has, has)] += 1
            total_S[has] += 1
            row += has
        placed.append(row)
    return placed


@pytest.mark.parametrize(
    ("servers", "experts", "slots"), [(1, 5, 5), (4, 6, 3), (7, 40, 9), (65, 70, 2), (130, 40, 1)]
)
def test_replicas_go_where_a_plain_search_puts_them(servers: int, experts: int, slots: int) -> None:
    """Few servers, whose pairs are counted in 32 bits, and many; sets of one word, and of several."""
    rng = np.random.default_rng(servers)
    count_LE = np.ones((4, experts), np.int64)
    for count_E in count_LE:
        for _ in range(servers * slots - experts):
            able = np.flatnonzero(count_E < servers)
            count_E[rng.choice(able)] += 1
    server_LP = np.full((4, servers * slots), -1, np.int32)
    compiled.spread(count_LE, np.full((4, servers), slots), server_LP)
    assert server_LP.tolist() == plain_spread(count_LE, slots, servers)
