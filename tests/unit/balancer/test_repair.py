"""The spread policy, and repairs of a placement."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from balancer.policies.repair import repair, restore
from balancer.policies.spread import spread
from linear_program import fewest_loads


@st.composite
def worlds(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    """Any holdings of 1 to 6 servers, and a redundancy."""
    layers, servers, experts = (draw(st.integers(1, n)) for n in (3, 6, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    density = draw(st.sampled_from([0.0, 0.2, 0.5, 1.0]))
    holds_LSE = rng.random((layers, servers, experts)) < density
    holds_LSE[:, : draw(st.integers(0, servers))] = False
    return holds_LSE, draw(st.integers(1, 4))


@given(worlds())
def test_every_expert_has_its_replicas_evenly_spread_at_once(world: tuple[np.ndarray, int]) -> None:
    holds_LSE, redundancy = world
    next_LSE = repair(holds_LSE, redundancy)
    assert (next_LSE.sum(axis=1) == min(redundancy, holds_LSE.shape[1])).all()
    count_LS = next_LSE.sum(axis=2)
    assert (count_LS.max(axis=1) - count_LS.min(axis=1) <= 1).all()
    assert (repair(next_LSE, redundancy) == next_LSE).all(), "a level placement stays"


def least_loads(had_SE: np.ndarray, now_SE: np.ndarray, replicas: int) -> int:
    """Fewest loads of any layout with these counts per server."""
    lacking_S = now_SE.sum(axis=1) - had_SE.sum(axis=1)
    missing_E = replicas - had_SE.sum(axis=0)
    bound = max(np.maximum(lacking_S, 0).sum(), np.maximum(missing_E, 0).sum())
    loads = (now_SE & ~had_SE).sum()
    return int(bound if loads == bound else fewest_loads(had_SE, now_SE.sum(axis=1), replicas))


@given(
    st.integers(1, 4),
    st.integers(1, 8),
    st.integers(1, 24),
    st.integers(1, 3),
    st.lists(st.tuples(st.sampled_from(["join", "leave"]), st.integers(0, 99)), max_size=8),
)
@example(3, 6, 19, 3, [("leave", 58)])
def test_only_what_must_move_does(layers, servers, experts, redundancy, steps) -> None:
    """Along any history of servers that join and leave, each step loads as little as its counts allow."""
    holds_LSE, _ = spread(layers, experts, servers, min(redundancy, servers))
    for what, which in steps:
        servers = holds_LSE.shape[1]
        if what == "join":
            new_L1E = np.zeros((layers, 1, experts), dtype=bool)
            had_LSE = np.concatenate([holds_LSE, new_L1E], axis=1)
        elif servers > 1:
            had_LSE = np.delete(holds_LSE, which % servers, axis=1)
        else:
            continue
        holds_LSE = repair(had_LSE, redundancy)
        replicas = min(redundancy, had_LSE.shape[1])
        for had_SE, now_SE in zip(had_LSE, holds_LSE, strict=True):
            assert (now_SE & ~had_SE).sum() == least_loads(had_SE, now_SE, replicas)


@pytest.mark.parametrize(("servers", "redundancy"), [(3, 2), (4, 2), (5, 3)])
def test_totals_over_the_layers_stay_level(servers: int, redundancy: int) -> None:
    holds_LSE, _ = spread(13, 7, servers, redundancy)
    new_L1E = np.zeros((13, 1, 7), dtype=bool)
    total_S = repair(np.concatenate([holds_LSE, new_L1E], axis=1), redundancy).sum(axis=(0, 2))
    assert total_S.max() - total_S.min() <= 2


@pytest.mark.parametrize("servers", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("redundancy", [1, 2, 3])
def test_a_first_placement_needs_no_repair(servers: int, redundancy: int) -> None:
    for experts in (1, 7, 8, 60):
        holds_LSE, _ = spread(13, experts, servers, min(redundancy, servers))
        assert (repair(holds_LSE, redundancy) == holds_LSE).all()


@given(worlds(), st.data())
def test_orphans_are_restored_and_nothing_else_changes(world, data) -> None:
    holds_LSE, _ = world
    servers = holds_LSE.shape[1]
    alive_S = np.array(data.draw(st.lists(st.booleans(), min_size=servers, max_size=servers)))
    alive_S[data.draw(st.integers(0, servers - 1))] = True
    next_LSE = restore(holds_LSE, alive_S, alive_S)
    assert next_LSE[:, alive_S].any(axis=1).all()
    assert (next_LSE >= holds_LSE).all()
    orphan_LE = ~holds_LSE[:, alive_S].any(axis=1)
    assert ((next_LSE & ~holds_LSE).sum(axis=1) == orphan_LE).all()


@st.composite
def arguments(draw: st.DrawFn) -> tuple[int, int, int, int]:
    servers = draw(st.integers(1, 9))
    return (
        draw(st.integers(1, 6)),
        draw(st.integers(1, 40)),
        servers,
        draw(st.integers(1, servers)),
    )


@settings(max_examples=150)
@given(arguments())
def test_every_expert_is_on_as_many_servers_as_asked_and_loads_are_level(args) -> None:
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
@example((5, 34, 9, 3))  # Sharing alone would put one server ahead.
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
