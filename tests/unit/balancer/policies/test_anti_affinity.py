"""Replicas of an expert are on different nodes wherever the counts allow it, and in different racks."""

from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancer.policies import names, plan
from balancer.policies.anti_affinity import Nodes, apply_anti_affinity, count_on_one_node
from balancer.policies.repair import even_shares
from balancer.policies.spread import spread
from linear_program import fewest_on_one_node


def alone(holds_SE: np.ndarray, node_S: np.ndarray) -> int:
    """Experts with two or more replicas, all on one node."""
    return sum(
        len(holders) > 1 and len({node_S[s] for s in holders}) == 1
        for holders in (np.flatnonzero(row) for row in holds_SE.T)
    )


def apart(
    holds_LSE: np.ndarray, shares_LSE: np.ndarray, node_S: Sequence[Hashable], **more: Any
) -> tuple[np.ndarray, np.ndarray]:
    """The layout that the pass makes of one, which stays as it is."""
    then_LSE, then_shares = holds_LSE.copy(), np.array(shares_LSE, np.float64)
    apply_anti_affinity(then_LSE, then_shares, Nodes.of(node_S), **more)
    return then_LSE, then_shares


def check_kept(before_LSE: np.ndarray, after_LSE: np.ndarray) -> None:
    assert (after_LSE.sum(axis=1) == before_LSE.sum(axis=1)).all(), "replicas of experts"
    assert (after_LSE.sum(axis=2) == before_LSE.sum(axis=2)).all(), "replicas on servers"


@st.composite
def cluster(draw: st.DrawFn) -> np.ndarray:
    """node_S: 2 to 64 nodes of up to 8 servers, in any order."""
    nodes = draw(st.one_of(st.integers(2, 6), st.sampled_from([8, 16, 32, 64])))
    most = 8 if nodes <= 8 else 2
    sizes = draw(
        st.one_of(
            st.integers(1, most).map(lambda n: [n] * nodes),
            st.lists(st.integers(1, most), min_size=nodes, max_size=nodes),
        )
    )
    node_S = np.repeat(np.arange(nodes), sizes)
    return (
        np.random.default_rng(draw(st.integers(0, 9))).permutation(node_S)
        if draw(st.booleans())
        else node_S
    )


@settings(max_examples=150)
@given(
    node_S=cluster(),
    experts=st.integers(1, 40),
    more=st.floats(0, 2),
    loads=st.sampled_from(["equal", "skewed"]),
    policy=st.sampled_from(["spread", "fractional"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_expert_is_alone_unless_it_must_be(node_S, experts, more, loads, policy, seed) -> None:
    servers = len(node_S)
    slots = min(servers * experts, experts + int(more * experts))
    load_LE = np.ones((2, experts))
    if loads == "skewed":
        load_LE = np.random.default_rng(seed).pareto(1.0, (2, experts)) + 0.01
    before = plan(policy, load_LE, servers, slots)
    after = plan(policy, load_LE, servers, slots, nodes_S=node_S)
    check_kept(before.holds_LSE, after.holds_LSE)
    assert ((after.shares_LSE > 0) <= after.holds_LSE).all()
    np.testing.assert_allclose(after.shares_LSE.sum(axis=1), 1)
    for was_SE, is_SE in zip(before.holds_LSE, after.holds_LSE, strict=True):
        least = fewest_on_one_node(was_SE.sum(axis=1), was_SE.sum(axis=0), node_S)
        assert alone(is_SE, node_S) == least
    # `spread` ignores load. With fewer than two slots a server or two replicas an expert, or on nodes of
    # different sizes, the replicas that balance the load may fit on one node only.
    spread_is_even = loads == "equal" and slots % experts == 0
    is_roomy = slots >= 2 * max(servers, experts) and len(set(np.bincount(node_S))) == 1
    if is_roomy and (policy == "fractional" or spread_is_even):
        assert (after.par_L <= before.par_L * (1 + 1e-6)).all()


@settings(max_examples=150)
@given(
    node_S=cluster(),
    experts=st.integers(1, 24),
    seed=st.integers(0, 2**32 - 1),
    density=st.floats(0.02, 0.9),
    fixed=st.sampled_from([0.0, 0.0, 0.3]),
)
def test_any_layout_is_repaired_as_far_as_its_counts_allow(
    node_S: np.ndarray, experts: int, seed: int, density: float, fixed: float
) -> None:
    rng = np.random.default_rng(seed)
    holds_LSE = rng.random((1, len(node_S), experts)) < density
    holds_LSE[0, rng.integers(len(node_S), size=experts), np.arange(experts)] = True
    fixed_LSE = holds_LSE & (rng.random(holds_LSE.shape) < fixed)
    load_LE = rng.pareto(1.0, (1, experts))
    after_LSE, shares_LSE = apart(
        holds_LSE,
        even_shares(holds_LSE),
        node_S.tolist(),
        load_LE=load_LE,
        fixed_LSE=fixed_LSE,
        spread_over=int(rng.integers(2, 5)),
    )
    check_kept(holds_LSE, after_LSE)
    assert (fixed_LSE <= after_LSE).all()
    np.testing.assert_allclose(shares_LSE.sum(axis=1), 1)
    least = fewest_on_one_node(holds_LSE[0].sum(axis=1), holds_LSE[0].sum(axis=0), node_S)
    found = alone(after_LSE[0], node_S)
    assert found >= least if fixed_LSE.any() else found == least


@pytest.mark.parametrize("policy", names())
def test_every_policy(policy: str) -> None:
    """Also from a current layout, where the pass moves no more than it must."""
    node_S = np.arange(16) // 4
    load_LE = np.random.default_rng(3).pareto(1.5, (3, 64)) + 0.1
    fresh = plan(policy, load_LE, 16, 128, nodes_S=node_S)
    assert not any(alone(holds_SE, node_S) for holds_SE in fresh.holds_LSE)
    again = plan(policy, load_LE, 16, 128, nodes_S=node_S, current=fresh)
    assert not any(alone(holds_SE, node_S) for holds_SE in again.holds_LSE)


def test_a_current_layout_that_is_apart_stays() -> None:
    node_S = np.arange(16) // 4
    holds_LSE, shares_LSE = apart(*spread(4, 64, 16, 2), node_S.tolist())
    again_LSE, _ = apart(holds_LSE, shares_LSE, node_S.tolist(), current_LSE=holds_LSE)
    assert (again_LSE == holds_LSE).all()


def test_moves_of_replicas_that_are_there_come_first() -> None:
    # Expert 0 is on node a only. Server 3 had it, and server 0 had expert 4: they exchange without a load.
    holds_LSE = np.zeros((1, 4, 5), bool)
    for server, experts in enumerate(([0, 1], [0, 2], [1, 3], [2, 4])):
        holds_LSE[0, server, experts] = True
    current_LSE = holds_LSE.copy()
    current_LSE[0, 3, 0] = current_LSE[0, 0, 4] = True
    after_LSE, _ = apart(holds_LSE, holds_LSE / 2, ["a", "a", "b", "b"], current_LSE=current_LSE)
    assert not alone(after_LSE[0], np.array([0, 0, 1, 1]))
    assert (after_LSE <= current_LSE).all()


def test_the_share_of_a_moved_replica_goes_with_it() -> None:
    holds_LSE = np.zeros((1, 4, 2), bool)
    holds_LSE[0, [0, 1, 2, 3], [0, 0, 1, 1]] = True
    shares_LSE = np.where(holds_LSE, [[[0.75, 0], [0.25, 0], [0, 0.75], [0, 0.25]]], 0.0)
    after_LSE, moved_LSE = apart(holds_LSE, shares_LSE, ["a", "a", "b", "b"])
    assert not alone(after_LSE[0], np.array([0, 0, 1, 1]))
    assert ((moved_LSE > 0) == after_LSE).all()
    assert sorted(moved_LSE[0].sum(axis=1)) == sorted(shares_LSE[0].sum(axis=1))


def test_three_replicas_without_a_load_get_three_nodes() -> None:
    node_S = np.arange(12) // 3
    found = plan("spread", np.ones((2, 32)), 12, 96, nodes_S=node_S)
    on_LNE = np.stack([found.holds_LSE[:, node_S == n].sum(axis=1) for n in range(4)], axis=1)
    assert on_LNE.max() == 1


@pytest.mark.parametrize("policy", ["spread", "fractional"])
def test_racks_come_after_nodes(policy: str) -> None:
    names_S = [f"rack{s // 8}/node{s // 2 % 4}" for s in range(16)]
    load_LE = np.ones((4, 64))
    found = plan(policy, load_LE, 16, 128, nodes_S=names_S)
    node_S, rack_S = np.arange(16) // 2, np.arange(16) // 8
    assert not any(alone(holds_SE, node_S) for holds_SE in found.holds_LSE)
    assert not any(alone(holds_SE, rack_S) for holds_SE in found.holds_LSE)


@given(seed=st.integers(0, 2**32 - 1), experts=st.integers(1, 12))
def test_racks_of_any_size(seed: int, experts: int) -> None:
    """Racks never cost a node; without nodes of more than one server they are as far apart as can be."""
    rng = np.random.default_rng(seed)
    rack_S = np.sort(rng.integers(3, size=9))
    node_S = np.cumsum(np.r_[0, (np.diff(rack_S) > 0) | (rng.random(8) < 0.6)])
    holds_LSE = rng.random((1, 9, experts)) < 0.3
    names_S = [f"r{rack}/n{node}" for rack, node in zip(rack_S, node_S, strict=True)]
    after_LSE, _ = apart(holds_LSE, even_shares(holds_LSE), names_S)
    counts: Any = holds_LSE[0].sum(axis=1), holds_LSE[0].sum(axis=0)
    check_kept(holds_LSE, after_LSE)
    assert alone(after_LSE[0], node_S) == fewest_on_one_node(*counts, node_S)
    if node_S[-1] == 8:
        assert alone(after_LSE[0], rack_S) == fewest_on_one_node(*counts, rack_S)


def test_what_counts_as_alone() -> None:
    holds_LSE = np.zeros((1, 3, 4), bool)
    holds_LSE[0, [0, 1], 0] = holds_LSE[0, [0, 2], 1] = holds_LSE[0, 2, 2] = True
    # Expert 0 is on node a, expert 2 on node b; expert 3 has no server.
    assert count_on_one_node(holds_LSE, Nodes.of(["a", "a", "b"])) == 2
    assert count_on_one_node(holds_LSE, Nodes.of(["a", "a", "a"])) == 3


@pytest.mark.parametrize("nodes", [[0, 1], [0, 1, -1], [0.5, 1, 2], [["a"], ["b"], ["c"]]])
def test_wrong_nodes_are_refused(nodes: Any) -> None:
    with pytest.raises(ValueError, match="nodes_S must be 3 names, or whole numbers"):
        plan("spread", np.ones((1, 4)), 3, 8, nodes_S=nodes)
