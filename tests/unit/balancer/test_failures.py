"""The loss of servers, nodes and racks, and upgrades, in simulated time with the live planner."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scale.cluster import Cluster, Sizes, point
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


@settings(max_examples=25)
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


@settings(max_examples=25)
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
