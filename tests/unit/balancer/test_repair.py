"""Repairs of a placement."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
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
def test_only_what_must_move_does(
    layers: int, servers: int, experts: int, redundancy: int, steps: list[tuple[str, int]]
) -> None:
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
def test_orphans_are_restored_and_nothing_else_changes(
    world: tuple[np.ndarray, int], data: st.DataObject
) -> None:
    holds_LSE, _ = world
    servers = holds_LSE.shape[1]
    alive_S = np.array(data.draw(st.lists(st.booleans(), min_size=servers, max_size=servers)))
    alive_S[data.draw(st.integers(0, servers - 1))] = True
    next_LSE = restore(holds_LSE, alive_S, alive_S)
    assert next_LSE[:, alive_S].any(axis=1).all()
    assert (next_LSE >= holds_LSE).all()
    orphan_LE = ~holds_LSE[:, alive_S].any(axis=1)
    assert ((next_LSE & ~holds_LSE).sum(axis=1) == orphan_LE).all()
