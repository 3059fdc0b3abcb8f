"""The planner's decisions, case by case."""

from dataclasses import replace

import numpy as np
import pytest

from balancer.planner.actions import Action, Complain, Prepare, Retire
from balancer.planner.layout import Layout, Settings
from balancer.planner.planner import Planner
from eaas.nodes import different_nodes
from placement_world import (
    ACK_S,
    DRAINING,
    GRACE_S,
    SHAPE,
    SUSPECT,
    World,
    kinds,
    server,
    settled,
    view,
)

OTHER = replace(SHAPE, digest="digest-b")


def prepares(actions: list[Action]) -> dict[str, Prepare]:
    return {a.server_id: a for a in actions if isinstance(a, Prepare)}


# -- the first placement ---------------------------------------------------------------------------


def test_a_server_of_another_model_is_refused_once_for_each_life_and_does_not_count() -> None:
    planner = Planner(2, Layout(Settings(redundancy=1)))
    odd = server("s0", model=OTHER)
    actions = planner.observe(view(odd, server("s1"), server("s2")), 0.0)
    (refusal,) = (a for a in actions if isinstance(a, Complain))
    assert refusal.refused == "s0"
    assert "digest-b" in refusal.reason
    assert "digest-a" in refusal.reason
    assert sorted(prepares(actions)) == ["s1", "s2"]
    assert planner.observe(view(odd, server("s1"), server("s2")), 0.0) == []
    again = planner.observe(view(replace(odd, incarnation=2), server("s1"), server("s2")), 0.0)
    assert [type(a) for a in again] == [Complain]
    for other in (server("s2", model=OTHER), server("s2", model=None)):
        planner = Planner(2, Layout(Settings(redundancy=1)))
        assert prepares(planner.observe(view(server("s1"), other), 0.0)) == {}


def test_more_redundancy_than_servers_is_an_error() -> None:
    with pytest.raises(ValueError, match="redundancy 3 is above expected_servers 2"):
        Planner(2, Layout(Settings(redundancy=3)))


# -- a server joins --------------------------------------------------------------------------------


def test_a_server_that_joins_gets_a_share_with_the_least_loads() -> None:
    world = settled("s1", "s2", "s3")
    world.loads = 0
    world.start("s4")
    assert kinds(world) == sorted(((Prepare, f"s{i}") for i in (1, 2, 3, 4)), key=str)
    world.answer_all()
    assert world.published.epoch == 2
    assert world.published.servers == ("s1", "s2", "s3", "s4")
    # Nobody but the new one loads anything, and the client still has its replicas everywhere.
    assert world.loads == world.stores["s4"].sum() == 2 * 6 * 2 / 4
    assert world.covered(world.follows["c"]).all()
    world.assert_settles()


def test_nothing_is_retired_before_every_client_follows_or_its_time_is_over() -> None:
    world = settled("s1", "s2", clients=("c", "d"))
    world.start("s3")
    world.answer_all()
    world.follow("c")
    assert kinds(world) == []
    world.wait(ACK_S - 0.1)
    assert kinds(world) == []
    assert world.planner.wake_at(world.now) == pytest.approx(world.now + 0.1)
    del world.follows["d"]  # From here on it is nobody's fault.
    world.wait(0.2)
    assert kinds(world) == sorted(((Retire, f"s{i}") for i in (1, 2, 3)), key=str)
    world.assert_settles()


def test_a_suspected_server_keeps_its_share_and_gets_nothing_new() -> None:
    world = settled("s1", "s2", "s3")
    world.members["s1"] = replace(world.members["s1"], state=SUSPECT)
    world.notify()
    assert world.calls == []
    world.die("s2")
    world.die("s3")
    assert world.calls == [], "there is nobody that is able"


def test_pinned_replicas_are_in_every_layout() -> None:
    world = settled("s1", "s2", "s3", redundancy=1)
    pins = frozenset((0, expert, server) for expert in range(2) for server in ("s1", "s2"))
    world.layout.change(pins=pins)
    world.start("s4")
    world.settle()
    world.drain("s3")
    world.settle()
    placement = world.published
    assert placement.servers == ("s1", "s2", "s4")
    assert placement.holds_LSE[0, :2, :2].all()
    assert np.allclose(placement.shares_LSE.sum(axis=1), 1)
    assert ((placement.shares_LSE > 0) == placement.holds_LSE).all()


def test_pinned_replicas_stay_on_one_node() -> None:
    servers = ("s1", "s2", "s3")
    pins = frozenset((0, expert, server) for expert in range(2) for server in servers[:2])
    layout = Layout(Settings(redundancy=1, pins=pins))
    layout.know({"s1": "a", "s2": "a", "s3": "b"})
    held_LSE = np.repeat(np.eye(3, dtype=bool), 2, axis=1)[None]
    holds_LSE, _ = layout.around(servers, held_LSE, held_LSE.astype(float))
    assert holds_LSE[0, :2, :2].all()


# -- a server dies ---------------------------------------------------------------------------------


def test_a_server_that_woke_with_its_weights_is_left_alone() -> None:
    world = settled("s1", "s2")
    world.members["s2"] = replace(world.members["s2"], incarnation=2)
    world.notify()
    assert all(isinstance(call, Retire) for _, call in world.calls)
    world.assert_settles()


def test_a_dead_server_is_replaced_after_the_grace_and_gets_its_share_again_before() -> None:
    world = settled("s1", "s2", "s3")
    before = world.published
    world.die("s3")
    assert world.calls == []
    assert world.planner.wake_at(world.now) == world.now + GRACE_S
    world.wait(GRACE_S - 1)
    world.start("s3")
    world.assert_settles()
    assert world.published is before
    world.die("s3")
    world.wait(GRACE_S)
    world.assert_settles()
    assert world.published.servers == ("s1", "s2")


def test_orphans_are_restored_at_once_and_alone() -> None:
    world = settled("s1", "s2", "s3", redundancy=1)
    lost = int(world.stores["s3"].sum())
    world.loads = 0
    world.die("s3")
    world.answer_all()
    assert world.loads == lost
    assert world.covered(world.published).all()
    # Its return is still waited for; then it takes its old share back.
    assert "s3" in world.published.servers
    world.settle()
    world.start("s3")
    world.assert_settles()


def answer_all_but(world: World, hung: str) -> None:
    """Answer all calls but those to a hung server; clients follow."""
    while True:
        place = next((i for i, (_, c) in enumerate(world.calls) if c.server_id != hung), None)
        if place is not None:
            world.answer(place)
        elif world.published is not world.follows["c"]:
            world.follow("c")
        else:
            return


@pytest.mark.parametrize(
    ("names", "events", "hung"),
    [
        ("s1 s2 s3", "start s4, die s3", ""),
        ("s1 s2 s3", "start s4, die s2", "s4"),
        ("s1 s2 s3", "drain s3, start s4, die s3", "s4"),
        ("s1 s2", "die s1, die s2, start s3", ""),
        ("s1 s2", "die s2, start s2, lose s2, start s3, drain s2", ""),
    ],
)
def test_orphans_are_restored_whatever_else_happens(names: str, events: str, hung: str) -> None:
    world = settled(*names.split(), redundancy=1)
    for event in events.split(", "):
        kind, name = event.split()
        if kind == "lose":
            world.unreachable = {name}
        else:
            getattr(world, kind)(name)
    answer_all_but(world, hung)
    assert world.covered(world.published).all()


def test_orphans_are_not_published_on_a_server_that_could_hold_no_more_and_died() -> None:
    world = settled("s1", "s2", "s3", redundancy=1)
    world.unreachable = {"s2"}
    world.die("s3")
    while not world.refusals:
        world.answer()
    assert world.calls[0][1].placement.servers == ("s1", "s2", "s3")
    world.die("s2")
    world.settle()
    assert world.covered(world.published).all()


# -- a server leaves, or cannot load ---------------------------------------------------------------


def test_drain_refusals() -> None:
    world = settled("s1", "s2")
    assert world.planner.cordon("s2") is None
    # It has not said so yet.
    assert "s1 is the last server that can hold experts" in world.planner.cordon("s1")
    assert world.planner.cordon("s2") is None, "told twice"
    world.planner.pool.uncordon("s2")
    assert world.planner.cordon("s1") is None
    world.planner.pool.uncordon("s1")
    world.drain("s2")
    assert "s1 is the last server that can hold experts" in world.planner.cordon("s1")


def test_a_server_that_cannot_load_is_given_up_and_others_take_its_share() -> None:
    world = settled("s1", "s2")
    world.start("s3")
    for _ in range(50):
        if not world.calls:
            break
        world.answer(fail=world.calls[0][1].server_id == "s3")
    (refusal,) = world.refusals
    assert refusal.refused == "s3"
    world.settle()
    assert world.published.servers == ("s1", "s2")
    # It gets another chance, twice as long after each that it missed; another process has one at once.
    world.unreachable = {"s3"}
    assert world.planner.wake_at(world.now) == world.now + GRACE_S
    world.wait(GRACE_S)
    world.settle()
    assert len(world.refusals) == 2
    assert world.planner.wake_at(world.now) == world.now + 2 * GRACE_S
    assert world.published.servers == ("s1", "s2")
    world.die("s3")
    world.start("s3")
    world.assert_settles()


def test_the_planner_continues_without_a_server_that_hangs_in_a_load() -> None:
    world = settled("s1", "s2", "s3")
    world.start("s4")
    (hanging,) = (c for _, c in world.calls if c.server_id == "s4")
    world.apply(world.planner.failed(hanging, world.now, timed_out=True))
    assert any("took too long" in r.reason for r in world.refusals)
    world.calls = [(p, c) for p, c in world.calls if c is not hanging]
    world.settle()
    assert world.published.servers == ("s1", "s2", "s3")
    world.wait(GRACE_S)
    world.assert_settles()


def test_before_the_first_placement_no_server_is_given_up() -> None:
    planner = Planner(2, Layout(Settings(redundancy=1)))
    asked = prepares(planner.observe(view(server("s1"), server("s2")), 0.0))
    for _ in range(20):
        assert planner.failed(asked["s1"], 0.0) == []
        assert planner.is_wanted(asked["s1"])


# -- nodes -----------------------------------------------------------------------------------------


def on_nodes(world: World) -> np.ndarray:
    """Different nodes of each expert in the published placement, (L, E)."""
    placement = world.published
    nodes = [world.members[s].node for s in placement.servers]
    return different_nodes(placement.replicas, nodes)


def settled_on(**nodes: str) -> World:
    world = World(len(nodes), 2)
    for name, node in nodes.items():
        world.start(name)
        world.members[name] = replace(world.members[name], node=node)
    world.notify()
    world.settle()
    # The first placement may be older than the names of the last nodes.
    world.assert_settles()
    return world


def test_replicas_are_on_different_nodes_after_joins_drains_and_deaths() -> None:
    world = settled_on(s1="a", s2="a", s3="b", s4="b")
    assert (on_nodes(world) == 2).all()
    for name, node in (("s5", "c"), ("s6", "c")):
        world.start(name)
        world.members[name] = replace(world.members[name], node=node)
        world.notify()
        world.settle()
    assert world.published.servers == ("s1", "s2", "s3", "s4", "s5", "s6")
    assert (on_nodes(world) == 2).all()
    world.members["s2"] = replace(world.members["s2"], state=DRAINING)
    world.notify()
    world.settle()
    assert "s2" not in world.published.servers
    assert (on_nodes(world) == 2).all()
    world.die("s3")
    world.die("s4")
    world.rest(1)
    assert world.published.servers == ("s1", "s5", "s6")
    # Two of the three servers left are on one node: six of twelve replicas are on it at most.
    assert (world.published.holds_LSE.sum(axis=1) == 2).all()


def test_a_server_on_another_node_than_before_makes_a_repair() -> None:
    world = settled_on(s1="a", s2="a", s3="a", s4="a")
    epoch = world.published.epoch
    world.wait(1.0)
    world.settle()
    assert world.published.epoch == epoch, "one node needs no repair"
    world = settled_on(s1="a", s2="a", s3="b", s4="b")
    epoch = world.published.epoch
    world.members["s2"] = replace(world.members["s2"], node="b")
    world.members["s3"] = replace(world.members["s3"], node="a")
    world.notify()
    world.settle()
    assert world.published.epoch > epoch
    assert (on_nodes(world) == 2).all()
    world.assert_settles()
