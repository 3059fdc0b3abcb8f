"""Moves reach the target, never uncover an expert, and keep to the slots."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.policies.moves import Move, ordered_moves

Holds = npt.NDArray[np.bool_]


def layout(draw: st.DrawFn, experts: int, slots: list[int]) -> Holds:
    """(1, S, E): each expert has a server, no server more than its slots."""
    holds_SE = np.zeros((len(slots), experts), dtype=np.bool_)
    for expert in draw(st.permutations(range(experts))):
        free = [s for s, room in enumerate(slots) if holds_SE[s].sum() < room]
        holds_SE[draw(st.sampled_from(free)), expert] = True
    for server, expert in draw(
        st.lists(st.tuples(st.integers(0, len(slots) - 1), st.integers(0, experts - 1)))
    ):
        if holds_SE[server].sum() < slots[server]:
            holds_SE[server, expert] = True
    return holds_SE[None]


@st.composite
def ways(draw: st.DrawFn) -> tuple[Holds, Holds, npt.NDArray[np.int64]]:
    experts, servers = draw(st.integers(1, 8)), draw(st.integers(1, 5))
    slots = draw(st.lists(st.integers(0, experts), min_size=servers, max_size=servers))
    slots[0] += max(0, experts + draw(st.integers(0, 2)) - sum(slots))
    first, then = layout(draw, experts, slots), layout(draw, experts, slots)
    return first, then, np.array([slots])


@given(ways())
def test_every_step_is_safe(way: tuple[Holds, Holds, npt.NDArray[np.int64]]) -> None:
    first_LSE, then_LSE, slots_LS = way
    held_LSE = first_LSE.copy()
    over = 0
    for move in ordered_moves(first_LSE, then_LSE, slots_LS):
        at = (move.layer, move.server, move.expert)
        assert held_LSE[at] == (move.kind == "unload")
        if move.kind == "load" and held_LSE[at[:2]].sum() == slots_LS[at[:2]]:
            # One too many only where the layer has neither a free slot nor a spare replica.
            assert (held_LSE[move.layer].sum(axis=0) == 1).all()
            assert not (held_LSE[move.layer].sum(axis=1) < slots_LS[move.layer]).any()
        held_LSE[at] = move.kind == "load"
        assert held_LSE.any(axis=1).all()
        over = max(over, int((held_LSE.sum(axis=2) - slots_LS).max()))
    assert (held_LSE == then_LSE).all()
    assert over <= 1
    # One too many only where no server that gets nothing has a place to wait.
    done_LS = ~(then_LSE & ~first_LSE).any(axis=2)
    assert not (over and (done_LS & (first_LSE.sum(axis=2) < slots_LS)).any())


@pytest.mark.parametrize(
    ("first", "then", "slots", "moves"),
    [
        # Where there is room, a load comes first.
        ([[1, 0], [0, 1]], [[1, 1], [0, 0]], [2, 2], [(1, 0, "load"), (1, 1, "unload")]),
        # A full server unloads first what others hold.
        ([[1, 0], [1, 1]], [[0, 1], [1, 1]], [1, 2], [(0, 0, "unload"), (1, 0, "load")]),
    ],
)
def test_the_order_of_two_moves(
    first: list[list[int]], then: list[list[int]], slots: list[int], moves: list[tuple]
) -> None:
    found = ordered_moves(np.array([first], bool), np.array([then], bool), np.array([slots]))
    assert found == tuple(Move(0, *move) for move in moves)
