"""Properties of the spread policy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

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
