"""A change of layout stays within memory, if that is possible."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from balancer.planner.stages import stages
from balancer.policies.moves import ordered_moves

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
