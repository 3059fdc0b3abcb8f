"""CRAFT: each algorithm against a plain version, the paper's figures, and the overall gain."""

import itertools
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancer.policies import Plan, plan
from balancer.policies.compact import place, replicate
from balancer.policies.craft import (
    Benefit,
    allocate,
    automatic_factor,
    gain_of,
    interleave,
    least_factor,
    replication_benefit,
)
from balancer.policies.problem import make_problem
from simulator.traces import REGIMES, generate_trace

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]


def layers_of_all_kinds(layers: int, experts: int, seed: int) -> Float:
    """Loads from nearly level to one expert far above the others."""
    rng = np.random.default_rng(seed)
    steepness = np.linspace(0.1, 1.1, layers)[:, None]
    return rng.permuted(np.arange(1, experts + 1)[None] ** -steepness, axis=1) * 1e4


def benefit(gain_KL: list[list[float]], replicas: list[int], limit: int = 99) -> Benefit:
    gains = np.array(gain_KL)
    return Benefit(np.array(replicas), gains, np.full(gains.shape[1], limit))


def test_gains_are_those_of_a_plain_replay() -> None:
    rng = np.random.default_rng(0)
    load_LE = layers_of_all_kinds(3, 16, 0)
    window_BLE = rng.poisson(load_LE, size=(21, 3, 16))
    window_BLE[5] = 0
    problem = make_problem(window_BLE.sum(axis=0), 4, 24)
    found = replication_benefit(problem, window_BLE)
    assert found.replicas_K.tolist() == [1, 2, 4]

    def balancedness(extra: int) -> Float:
        total_L = np.full(3, 16 + extra)
        count_LE = replicate(problem.load_LE, total_L, 4)
        slots_LS = interleave(total_L, problem.slots_LS)
        _, shares_LSE = place(problem.load_LE, count_LE, slots_LS, np.ones(4)).layout().dense()
        load_BLS = np.einsum("lse,ble->bls", shares_LSE, window_BLE)
        most_BL = load_BLS.max(axis=2)
        ratio_BL = np.divide(
            load_BLS.mean(axis=2), most_BL, out=np.ones_like(most_BL), where=most_BL > 0
        )
        by_layer: Float = ratio_BL.mean(axis=0)
        return by_layer

    for k, replicas in enumerate(found.replicas_K):
        expected_L = balancedness(int(replicas)) - balancedness(0)
        np.testing.assert_allclose(found.gain_KL[k], expected_L, atol=1e-5)


def test_one_batch_is_replayed_as_many_are() -> None:
    load_LE = layers_of_all_kinds(3, 16, 0)
    problem = make_problem(load_LE, 4, 24)
    one = replication_benefit(problem, load_LE[None])
    two = replication_benefit(problem, np.stack([load_LE, load_LE]))
    np.testing.assert_allclose(one.gain_KL, two.gain_KL, atol=1e-6)


@settings(max_examples=150)
@given(
    st.lists(st.lists(st.integers(-3, 9), min_size=3, max_size=3), min_size=3, max_size=3),
    st.integers(0, 13),
    st.integers(0, 5),
    st.booleans(),
)
def test_the_allotment_is_the_best_of_all(gain_KL, budget, limit, printed) -> None:
    replicas = [1, 2, 4]
    table = benefit([list(map(float, row)) for row in gain_KL], replicas, limit)
    found_L = allocate(table, budget, printed=printed)
    assert found_L.sum() <= budget

    def value(choice: tuple[int, ...]) -> int:
        return sum(
            gain_KL[replicas.index(r)][layer] * (r if printed else 1)
            for layer, r in enumerate(choice)
            if r
        )

    allowed = [0, *(r for r in replicas if r <= limit)]
    best = max(
        value(choice) for choice in itertools.product(allowed, repeat=3) if sum(choice) <= budget
    )
    assert value(tuple(found_L.tolist())) == best


def test_the_printed_form_prefers_many_replicas_to_much_gain() -> None:
    table = benefit([[0.5, 0.0], [0.5, 0.1], [0.5, 0.3]], [1, 2, 4])
    assert allocate(table, 4).tolist() == [1, 2]
    assert allocate(table, 4, printed=True).tolist() == [4, 0]
    # On loads, too, its summed gain is lower.
    load_LE = layers_of_all_kinds(12, 64, 1)
    estimated = replication_benefit(make_problem(load_LE, 16, 80), load_LE[None])
    ours, theirs = (
        gain_of(estimated, allocate(estimated, 32, printed=printed)) for printed in (False, True)
    )
    assert theirs < 0.9 * ours


def test_automatic_factor_has_the_highest_gain_per_replica() -> None:
    # Nothing from one replica per server (2 in all); 0.9 from 4; little more from 8.
    table = benefit([[0.0], [0.0], [0.9], [1.0]], [1, 2, 4, 8])
    assert automatic_factor(table, 2) == 2
    assert automatic_factor(benefit([[0.5], [0.6]], [1, 2]), 1) == 1
    assert automatic_factor(benefit([[0.0]], [1]), 1) == 0
    load_LE = layers_of_all_kinds(4, 16, 0)
    auto = plan("craft", load_LE, 4, 24, replication_factor="auto")
    assert auto.holds_LSE.sum() >= 64


@settings(max_examples=100)
@given(st.data())
def test_capacities_differ_by_one_in_a_layer_and_over_all(data: st.DataObject) -> None:
    servers, layers = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 6))
    total_L = np.array(
        data.draw(st.lists(st.integers(0, 5 * servers), min_size=layers, max_size=layers))
    )
    found_LS = interleave(total_L, np.full((layers, servers), 5))
    assert (found_LS.sum(axis=1) == total_L).all()
    assert (np.ptp(found_LS, axis=1) <= 1).all()
    assert np.ptp(found_LS.sum(axis=0)) <= 1
    slots_LS = np.array(
        data.draw(
            st.lists(
                st.lists(st.integers(0, 5), min_size=servers, max_size=servers),
                min_size=layers,
                max_size=layers,
            )
        )
    )
    least_L = np.minimum(total_L, slots_LS.sum(axis=1))
    limited_LS = interleave(least_L, slots_LS)
    assert (limited_LS.sum(axis=1) == least_L).all()
    assert (limited_LS <= slots_LS).all()
    for row, slots in zip(limited_LS, slots_LS, strict=True):
        # Nobody with room has two fewer than another.
        assert row[row < slots].min(initial=99) >= row.max() - 1


def test_the_papers_figure_interleaves_over_nodes() -> None:
    # Figure 7: four servers, two nodes; layers with 2, 2, 4 and 0 replicas.
    found_LS = interleave(np.array([2, 2, 4, 0]), np.full((4, 4), 1))
    assert found_LS[0].sum() == found_LS[1].sum() == 2
    assert (found_LS[0] + found_LS[1] == 1).all()
    assert found_LS.sum(axis=0).tolist() == [2, 2, 2, 2]


def replayed(counts_ILE: npt.NDArray[np.generic], found: Plan) -> float:
    """Balancedness, mean over batches and layers."""
    load_LIE = counts_ILE.transpose(1, 0, 2).astype(np.float32)
    load_LIS = load_LIE @ found.shares_LSE.transpose(0, 2, 1).astype(np.float32)
    return float((load_LIS.mean(axis=2) / load_LIS.max(axis=2)).mean())


# Of loads summed over a window, as the paper measures it: the one that is planned for, and the one that
# comes next. Then of single batches, these and those. What is missing in them is their noise: replicas halve
# it whether or not the load needs them, and EPLB has seven times as many.
@pytest.mark.parametrize(
    ("regime", "seen", "unseen"),
    [("skewed", 0.80, 0.79), ("flips", 0.83, 0.82)],
)
def test_most_of_the_gain_for_a_seventh_of_the_replicas(regime, seen, unseen) -> None:
    # The regime's first state: a flip between the windows is nobody's to foresee.
    counts_ILE = generate_trace(replace(REGIMES[regime], change="none"), iterations=128).counts_ILE
    window_WLE, next_WLE = np.split(counts_ILE, 2)
    load_LE = window_WLE.sum(axis=0)
    began = time.thread_time()
    craft = plan("craft", load_LE, 64, 320, window_WLE=window_WLE)
    assert time.thread_time() - began < 1.0
    eplb = plan("eplb", load_LE, 64, 320)
    alone = plan("craft", load_LE, 64, 320, replication_factor=0, refinement=0)
    assert alone.holds_LSE.sum() == 58 * 256
    replicas = craft.holds_LSE.sum() - 58 * 256
    assert replicas <= 8 * 64
    assert replicas * 7 <= eplb.holds_LSE.sum() - 58 * 256

    def kept(measure: Callable[[Plan], float]) -> float:
        base = measure(alone)
        return (measure(craft) - base) / (measure(eplb) - base)

    assert kept(lambda found: float((1 / found.par_L).mean())) > 0.97
    assert kept(lambda found: replayed(next_WLE.sum(axis=0)[None], found)) > 0.97
    assert kept(lambda found: replayed(window_WLE, found)) > seen
    assert kept(lambda found: replayed(next_WLE, found)) > unseen
    # Memory is level: over all layers servers differ by one replica.
    assert np.ptp(craft.holds_LSE.sum(axis=(0, 2))) <= 1


@pytest.mark.parametrize(("servers", "slots", "eight"), [(64, 320, True), (288, 576, False)])
def test_the_default_factor_follows_the_load(servers: int, slots: int, eight: bool) -> None:
    """R = 8 where it balances; more where servers have about one expert each and 8 leave hot ones alone."""
    counts_ILE = generate_trace(REGIMES["drift"], iterations=64).counts_ILE
    load_LE = counts_ILE.sum(axis=0)
    paper = plan("craft", load_LE, servers, slots, window_WLE=counts_ILE, replication_factor=8)
    found = plan("craft", load_LE, servers, slots, window_WLE=counts_ILE)
    peer = plan("eplb", load_LE, servers, slots)
    assert bool(paper.par_L.mean() < 1.1) is eight
    assert np.array_equal(found.holds_LSE, paper.holds_LSE) is eight
    assert found.par_L.mean() < 1.15 * peer.par_L.mean()
    assert found.holds_LSE.sum() <= peer.holds_LSE.sum()
    # Memory stays level.
    assert np.ptp(found.holds_LSE.sum(axis=(0, 2))) <= 1


def test_the_default_factor_gives_every_layer_what_balances_it() -> None:
    table = benefit([[0.1, 0.0], [0.2, 0.0], [0.3, 0.0]], [10, 20, 40])
    assert least_factor(table, 2) == 8  # without PARs, the paper's
    needs = replace(table, par_KL=np.array([[3, 1.1], [2, 1.1], [1.2, 1.1], [1.0, 1.1]]))
    assert least_factor(needs, 2) == 10  # 20 replicas and none, on two servers
    assert least_factor(needs, 4) == 8
    # No count is enough: the least that is about as good as the best.
    assert (
        least_factor(replace(table, par_KL=np.array([[3, 3], [2, 2.9], [2, 2], [1.99, 1]])), 2)
        == 25
    )
