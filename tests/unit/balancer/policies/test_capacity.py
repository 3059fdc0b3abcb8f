"""Layouts within memory."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from balancer.policies.capacity import NoCapacityError, fit, without_spares

L, S, E = 2, 4, 6


def layout(rng: np.random.Generator, spare: float) -> np.ndarray:
    holds_LSE = rng.random((L, S, E)) < spare
    layer, expert = np.nonzero(~holds_LSE.any(axis=1))
    holds_LSE[layer, rng.integers(S, size=len(layer)), expert] = True
    return holds_LSE


@given(seed=st.integers(0, 2**32), spare=st.floats(0, 0.9), more=st.integers(0, 6))
def test_every_expert_has_a_server_and_every_server_its_room(
    seed: int, spare: float, more: int
) -> None:
    rng = np.random.default_rng(seed)
    wanted, held = layout(rng, spare), layout(rng, spare)
    capacity_S = rng.multinomial(L * E + more, np.full(S, 1 / S))
    usable = np.minimum(capacity_S, L * E).sum()
    assume(usable >= L * E)
    found = fit(wanted, held, capacity_S)
    assert found.any(axis=1).all()
    assert (found.sum(axis=(0, 2)) <= capacity_S).all()
    replicas, before = found.sum(axis=1), wanted.sum(axis=1)
    assert (replicas <= before).all()
    # What could be given back was.
    free_S = capacity_S - found.sum(axis=(0, 2))
    for layer, expert in np.argwhere(replicas < before):
        assert not (~found[layer, :, expert] & (free_S > 0)).any()


@given(seed=st.integers(0, 2**32), spare=st.floats(0, 0.9))
def test_a_fitting_layout_stays(seed: int, spare: float) -> None:
    rng = np.random.default_rng(seed)
    wanted = layout(rng, spare)
    assert (fit(wanted, layout(rng, spare), wanted.sum(axis=(0, 2))) == wanted).all()


def test_too_little_memory_is_reported() -> None:
    wanted = layout(np.random.default_rng(0), 0.2)
    with pytest.raises(
        NoCapacityError, match=r"12 experts, and memory for 11 on 4 servers"
    ) as caught:
        fit(wanted, wanted, np.array([3, 3, 3, 2]), expert_bytes=1_000_000_000)
    for words in ("12.0 GB of expert memory", "have 11.0 GB", "start 1 more server"):
        assert words in str(caught.value)
    with pytest.raises(NoCapacityError, match="memory for 11"):
        # More than all experts is of no use to a server.
        fit(np.ones((L, 1, E), bool), np.ones((L, 1, E), bool), np.array([11]))


def test_only_what_a_living_server_has_too_is_spare() -> None:
    holds_LSE = np.zeros((1, 3, 3), bool)
    holds_LSE[0, 0] = holds_LSE[0, 1, 0] = holds_LSE[0, 2, 1] = True
    living_S = np.array([True, True, False])
    less_LSE, dropped = without_spares(holds_LSE, living_S, 0, 3)
    assert dropped == 1
    assert less_LSE[0, 0].tolist() == [False, True, True]
    assert (less_LSE[0, 1:] == holds_LSE[0, 1:]).all()
