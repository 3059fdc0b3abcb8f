"""Spare slots: the choice is nearly the best one, moves little, and never touches the placement."""

import itertools
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.policies import plan
from balancer.policies.spares import choose_spares
from balancer.policies.sparse import Layout
from eaas.minmax import levels, split

NONE = -1


def with_spares(layout: Layout, spare_S: Any) -> npt.NDArray[Any]:
    """(S, E): a layout and its spare replicas."""
    holds_SE = layout.dense()[1][0]
    server_N = np.flatnonzero(np.asarray(spare_S) != NONE)
    holds_SE[server_N, np.asarray(spare_S)[server_N]] = 1.0
    return holds_SE


def par(load_E: Any, layout: Layout, spare_S: Any) -> float:
    """PAR of a load under the best split over a layout and its spare replicas."""
    holds_SE = with_spares(layout, spare_S)
    load_1E = np.asarray(load_E, float)[None]
    return float(levels(load_1E, holds_SE)[0] / load_1E.sum() * len(holds_SE))


def excess(load_E: Any, layout: Layout, spare_S: Any) -> float:
    """Load above the mean of the servers, under the split that levels them all, over the mean server load."""
    holds_SE = with_spares(layout, spare_S)
    load_S = split(load_E, holds_SE, backlog_S=np.zeros(len(holds_SE))) @ load_E
    mean = float(load_S.mean())
    return float(np.maximum(load_S - mean, 0).sum() / mean) if mean else 0.0


@st.composite
def cases(draw: st.DrawFn) -> tuple[npt.NDArray[Any], Layout, npt.NDArray[Any]]:
    """Loads in scenarios (B, E), a layout that covers the experts, and held spare replicas (S)."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    servers, experts = draw(st.integers(1, 8)), draw(st.integers(1, 24))
    scenarios = draw(st.integers(1, 4))
    load_BE = np.exp(rng.normal(0, draw(st.sampled_from([0.0, 0.5, 2.0])), (scenarios, experts)))
    load_BE[rng.random(load_BE.shape) < draw(st.sampled_from([0.0, 0.3, 1.0]))] = 0.0
    holds_SE = rng.random((servers, experts)) < draw(st.sampled_from([0.0, 0.2]))
    holds_SE[rng.integers(servers, size=experts), np.arange(experts)] = True
    return load_BE, Layout.of(holds_SE[None]), rng.integers(NONE, experts, servers)


@given(cases(), st.sampled_from([0.0, 0.05, 0.5]), st.integers(0, 2**32 - 1))
def test_any_choice_keeps_the_rules(case: tuple[Any, Layout, Any], least: float, seed: int) -> None:
    load_BE, layout, held_S = case
    open_S = np.random.default_rng(seed).random(len(held_S)) < 0.7
    before = [array.copy() for array in layout.arrays]
    chosen_S = choose_spares(load_BE, layout, held_S, open_S=open_S, least=least)
    # The placement, the only holder of an expert's last replica, is as before.
    assert all(np.array_equal(a, b) for a, b in zip(layout.arrays, before, strict=True))
    # One expert a server, which it would not have otherwise.
    holds_SE = layout.holds_LSE[0]
    assert chosen_S.shape == held_S.shape
    assert ((chosen_S >= NONE) & (chosen_S < load_BE.shape[1])).all()
    server_N = np.flatnonzero(chosen_S != NONE)
    assert not holds_SE[server_N, chosen_S[server_N]].any()
    # A server that may not load drops its replica only if the placement has it, too.
    twice_S = (held_S != NONE) & holds_SE[np.arange(len(held_S)), held_S]
    kept_S = np.where(twice_S, NONE, held_S)
    assert (chosen_S == kept_S)[~open_S].all()
    again_S = choose_spares(load_BE, layout, held_S, open_S=open_S, least=least)
    assert np.array_equal(chosen_S, again_S)


@given(cases())
def test_an_even_load_moves_nothing(case: tuple[Any, Layout, Any]) -> None:
    load_BE, layout, held_S = case
    chosen_S = choose_spares(load_BE, layout, held_S)
    # What was chosen for these loads is kept.
    kept_S = choose_spares(np.zeros_like(load_BE), layout, chosen_S)
    assert np.array_equal(kept_S, chosen_S)


@given(cases())
def test_no_load_leaves_more_above_the_mean(case: tuple[Any, Layout, Any]) -> None:
    load_BE, layout, held_S = case
    holds_SE = layout.holds_LSE[0]
    held_S[holds_SE[np.arange(len(held_S)), held_S]] = NONE
    chosen_S = choose_spares(load_BE[:1], layout, held_S)
    # Servers within 1 % of the mean count as even.
    before, after = (excess(load_BE[0], layout, spare_S) for spare_S in (held_S, chosen_S))
    assert after <= before + 0.03 * len(held_S)


def small_case(seed: int) -> tuple[npt.NDArray[Any], Layout, npt.NDArray[Any], float]:
    """A load, a layout, held replicas, and the least PAR of all choices."""
    rng = np.random.default_rng(seed)
    servers = int(rng.integers(2, 5))
    experts = int(rng.integers(servers, 7))
    holds_SE = np.zeros((servers, experts), np.bool_)
    holds_SE[rng.integers(servers, size=experts), np.arange(experts)] = True
    load_E = np.exp(rng.normal(0, 0.8, experts))
    layout = Layout.of(holds_SE[None])
    best = min(
        par(load_E, layout, choice)
        for choice in itertools.product(range(NONE, experts), repeat=servers)
    )
    return load_E, layout, rng.integers(NONE, experts, servers), best


def test_the_choice_is_near_the_best_of_all() -> None:
    empty, held = [], []
    for seed in range(60):
        load_E, layout, held_S, best = small_case(seed)
        for start_S, ratios in ((np.full_like(held_S, NONE), empty), (held_S, held)):
            chosen_S = choose_spares(load_E[None], layout, start_S, least=0.0)
            ratios.append(par(load_E, layout, chosen_S) / best)
    assert max(empty) <= 1.04
    # Replicas that are held stay where that is nearly as good.
    assert np.mean(held) <= 1.06


def test_a_known_load_becomes_even() -> None:
    rng = np.random.default_rng(1)
    load_E = np.exp(rng.normal(0, 0.57, 256))
    holds_SE = np.repeat(np.eye(64, dtype=np.bool_), 4, axis=1)
    layout = Layout.of(holds_SE[None])
    none_S = np.full(64, NONE)
    chosen_S = choose_spares(load_E[None], layout, none_S, least=0.0)
    assert par(load_E, layout, none_S) > 1.5
    assert par(load_E, layout, chosen_S) < 1.02
    # Nothing is left to do.
    again_S = choose_spares(load_E[None], layout, chosen_S)
    assert np.array_equal(again_S, chosen_S)


def test_each_load_takes_its_part_of_the_excess() -> None:
    load_E = np.array([2.0, 1.0, 0.5, 0.5])
    layout = Layout.of(np.eye(4, dtype=np.bool_)[None])
    none_S = np.full(4, NONE)
    assert choose_spares(load_E[None], layout, none_S, least=0.4).tolist() == [NONE, NONE, 0, 0]
    # No server has room for more than half of the mean.
    assert choose_spares(load_E[None], layout, none_S, least=0.6).tolist() == [NONE] * 4


def test_scenarios_count_together() -> None:
    # Either of two experts may be hot; a replica of each helps.
    load_BE = np.array([[2.0, 0.5, 0.25, 0.25], [0.5, 2.0, 0.25, 0.25]])
    layout = Layout.of(np.eye(4, dtype=np.bool_)[None])
    chosen_S = choose_spares(load_BE, layout, np.full(4, NONE))
    assert {0, 1} <= {*chosen_S.tolist()}
    for load_E in load_BE:
        assert par(load_E, layout, chosen_S) < 1.4 < par(load_E, layout, np.full(4, NONE))


def test_slower_servers_get_less() -> None:
    load_E = np.array([4.0, 1.0, 1.0])
    layout = Layout.of(np.eye(3, dtype=np.bool_)[None])
    none_S = np.full(3, NONE)
    chosen_S = choose_spares(load_E[None], layout, none_S, speeds_S=[1.0, 0.5, 4.0])
    assert chosen_S[2] == 0
    assert chosen_S[1] == NONE


def test_a_plan_for_another_load_becomes_even() -> None:
    rng = np.random.default_rng(5)
    load_LE = np.exp(rng.normal(0, 0.5, (1, 32)))
    made = plan("fractional", load_LE, 8, 40)
    later_E = load_LE[0] * np.exp(rng.normal(0, 1.5, 32))
    chosen_S = choose_spares(later_E[None], made.layout, np.full(8, NONE), least=0.0)
    assert par(later_E, made.layout, chosen_S) < 1.02
    assert par(later_E, made.layout, np.full(8, NONE)) > 1.05


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"load_BE": [[1.0, -1.0, 1.0]]}, "load_BE"),
        ({"load_BE": [[1.0, 1.0]]}, "layout has shape"),
        ({"load_BE": np.ones((300, 3))}, "too many"),
        ({"spare_S": [0, 3]}, "spare_S must have an expert or -1"),
        ({"spare_S": [0]}, "spare_S must have an expert or -1"),
        ({"open_S": [True]}, "open_S has shape"),
        ({"speeds_S": [1.0, 0.0]}, "speeds_S must be 2 finite"),
        ({"speeds_S": [1.0, np.nan]}, "speeds_S must be 2 finite"),
        ({"least": -0.1}, "least is -0.1"),
    ],
)
def test_a_wrong_argument_is_named(changed: dict[str, Any], message: str) -> None:
    layout = Layout.of(np.array([[[True, True, False], [False, False, True]]]))
    given_ = {"load_BE": np.ones((1, 3)), "layout": layout, "spare_S": [NONE, NONE], **changed}
    with pytest.raises(ValueError, match=message):
        choose_spares(**given_)
