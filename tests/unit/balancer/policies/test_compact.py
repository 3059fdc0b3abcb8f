"""Placing and refining in compact form: replicas of one expert apart, slots used, peaks lower."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from balancer.policies.compact import Compact, place, refine, replicate
from balancer.policies.measure import par

Float = npt.NDArray[np.float64]
_LOAD = st.one_of(st.integers(0, 3).map(float), st.floats(0, 1e6))


@st.composite
def placed(draw: st.DrawFn) -> tuple[Float, npt.NDArray[np.int64], Float, Compact]:
    experts, servers = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    load_LE = draw(hnp.arrays(np.float64, (2, experts), elements=_LOAD))
    total = draw(st.integers(experts, experts * servers))
    slots_LS = np.tile(total // servers + (np.arange(servers) < total % servers), (2, 1))
    speeds_S = draw(hnp.arrays(np.float64, servers, elements=st.sampled_from([1.0, 2.0])))
    count_LE = replicate(load_LE, np.minimum(slots_LS, experts).sum(axis=1), servers)
    return load_LE, slots_LS, speeds_S, place(load_LE, count_LE, slots_LS, speeds_S)


@given(placed())
def test_every_slot_is_used_by_an_expert_that_is_not_there(
    given_: tuple[Float, npt.NDArray[np.int64], Float, Compact],
) -> None:
    _, slots_LS, _, found = given_
    held_LSE = found.layout().holds_LSE
    assert (held_LSE.sum(axis=2) == slots_LS).all()
    assert (held_LSE.sum(axis=1) == found.count_LE).all()


@given(placed(), st.integers(0, 9))
def test_refining_keeps_counts_and_never_raises_the_peak(
    given_: tuple[Float, npt.NDArray[np.int64], Float, Compact], budget: int
) -> None:
    load_LE, slots_LS, speeds_S, first = given_
    later = refine(first, load_LE, speeds_S, budget)
    held_LSE = later.layout().holds_LSE
    assert (held_LSE.sum(axis=2) == slots_LS).all()
    assert (held_LSE.sum(axis=1) == first.count_LE).all()
    before_L, after_L = (par(load_LE, *each.layout().dense(), speeds_S) for each in (first, later))
    assert (after_L <= before_L * (1 + 1e-9)).all()
    if budget == 0:
        assert (later.server_LP == first.server_LP).all()


def test_greedy_is_refined() -> None:
    # Greedy: 8 + 5 + 4 and 7 + 6; better: 6 + 5 + 4 and 7 + 8.
    load_LE = np.array([[8.0, 7.0, 6.0, 5.0, 4.0]])
    count_LE, slots_LS = np.ones((1, 5), dtype=np.int64), np.array([[3, 2]])
    first = place(load_LE, count_LE, slots_LS, np.ones(2))
    later = refine(first, load_LE, np.ones(2), 5)
    assert first.layout().server_load(load_LE).max() == 17
    assert later.layout().server_load(load_LE).max() == 15


@given(
    replicas=hnp.arrays(np.float64, (3, 7), elements=_LOAD),
    total=st.integers(7, 28),
    cap=st.integers(1, 4),
)
def test_replicas_lower_the_highest_load_as_far_as_they_can(
    replicas: Float, total: int, cap: int
) -> None:
    count_LE = replicate(replicas, np.full(3, total), cap)
    assert (count_LE.sum(axis=1) == min(total, 7 * cap)).all()
    assert count_LE.min() >= 1
    assert count_LE.max() <= cap
    for load_E, count_E in zip(replicas, count_LE, strict=True):
        highest = (load_E / count_E).max()
        if highest > 0 and total < 7 * cap:
            # For less, each expert would need these, which are more than there are.
            needed_E = np.ceil(load_E / (highest * (1 - 1e-9)))
            capped = (count_E == cap) & (load_E / count_E == highest)
            assert capped.any() or np.maximum(needed_E, 1).sum() > total
