"""The loss of servers, nodes and racks, and upgrades, in simulated time with the live planner."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scale.cluster import Cluster, Sizes, point
from eaas.nodes import different_nodes
from eaas.types import Placement


@st.composite
def clusters(draw: st.DrawFn) -> Sizes:
    racks = draw(st.integers(2, 4))
    nodes = racks * draw(st.integers(2, 4))
    return Sizes(
        servers=nodes * draw(st.integers(1, 3)),
        nodes=nodes,
        racks=racks,
        names_racks=draw(st.booleans()),
        clients=draw(st.integers(0, 3)),
        layers=draw(st.integers(1, 2)),
        experts=draw(st.integers(4, 24)),
    )


def replicas(cluster: Cluster) -> np.ndarray:  # type: ignore[type-arg]
    assert cluster.placement is not None
    return np.asarray(cluster.placement.holds_LSE.sum(axis=1))


@settings(deadline=None, max_examples=25)
@given(clusters(), st.integers(0, 1000))
def test_a_lost_node_uncovers_nothing_and_is_replaced(sizes: Sizes, seed: int) -> None:
    cluster = Cluster(sizes, seed)
    victims = cluster.on_node(seed % sizes.nodes)
    assert victims
    cluster.kill(victims)
    cluster.run(300.0)
    timeline = cluster.timeline
    assert timeline.most("uncovered") == 0.0
    assert timeline.zero_since_s("uncovered") == 0.0
    assert cluster.is_at_rest
    assert cluster.placement is not None
    assert not {*cluster.placement.servers} & {*victims}
    assert (replicas(cluster) == 2).all()
    # Not before the grace of a dead server is over.
    if timeline.most("single"):
        whole_s = timeline.zero_since_s("uncovered", "single")
        assert whole_s is not None
        assert whole_s >= sizes.lease_s + sizes.grace_s
        assert cluster.loads > 0


@settings(deadline=None, max_examples=25)
@given(clusters(), st.integers(0, 1000))
def test_experts_of_a_lost_rack_are_loaded_at_once(sizes: Sizes, seed: int) -> None:
    cluster = Cluster(sizes, seed)
    cluster.kill(cluster.in_rack(seed % sizes.racks))
    cluster.run(300.0)
    timeline = cluster.timeline
    # They do not wait for the grace of the dead servers.
    covered_s = timeline.zero_since_s("uncovered")
    assert covered_s is not None
    assert covered_s < sizes.lease_s + 5.0
    assert timeline.points[-1].uncovered == timeline.points[-1].single == 0.0
    assert (replicas(cluster) == 2).all()
    assert cluster.is_at_rest


def test_servers_that_name_their_racks_survive_the_loss_of_one() -> None:
    def lost(*, names_racks: bool) -> float:
        cluster = Cluster(Sizes(96, 24, 4, names_racks, layers=2, experts=64))
        cluster.kill(cluster.in_rack(1))
        return cluster.timeline.most("uncovered")

    assert lost(names_racks=True) == 0.0
    assert lost(names_racks=False) > 0.01


@settings(deadline=None, max_examples=15)
@given(clusters())
def test_a_server_that_returns_within_the_grace_moves_nothing(sizes: Sizes) -> None:
    cluster = Cluster(sizes)
    before = cluster.placement
    one = cluster.servers[:1]
    cluster.kill(one)
    cluster.start(one)
    cluster.run(100.0)
    assert cluster.placement is before
    assert before is not None
    assert cluster.loads == int(before.holds_LSE[:, 0].sum())
    assert cluster.timeline.most("uncovered") == 0.0
    assert cluster.timeline.points[-1].single == 0.0


@settings(deadline=None, max_examples=15)
@given(clusters())
def test_a_drained_server_leaves_no_expert_alone(sizes: Sizes) -> None:
    cluster = Cluster(sizes)
    one = cluster.servers[:1]
    cluster.drain(one)
    cluster.run(60.0)
    assert cluster.left() == list(one)
    assert cluster.timeline.most("single") == 0.0
    cluster.start(one)
    cluster.run(100.0)
    assert cluster.placement is not None
    assert cluster.placement.servers == cluster.servers
    assert cluster.is_at_rest
    assert cluster.timeline.most("single") == 0.0
    nodes = [s.split("-")[1] for s in cluster.placement.servers]
    assert (different_nodes(cluster.placement.replicas, nodes) == 2).all()


def test_a_point_by_hand() -> None:
    """Two servers share expert 0; the first alone has expert 1, the second alone expert 2."""
    holds_LSE = np.array([[[1, 1, 0], [1, 0, 1]]], bool)
    shares_LSE = np.array([[[0.5, 1, 0], [0.5, 0, 1]]], np.float32)
    placement = Placement(1, ("a", "b"), holds_LSE, shares_LSE)
    load_LE = np.array([[4, 2, 0]], np.float32)
    both = point(0.0, placement, {"a", "b"}, load_LE)
    assert (both.uncovered, both.single) == (0.0, 2 / 3)
    assert both.imbalance == np.float32(4 / 3)
    # The other takes all of expert 0.
    one = point(1.0, placement, {"b"}, load_LE)
    assert (one.uncovered, one.single, one.imbalance) == (1 / 3, 2 / 3, 1.0)
