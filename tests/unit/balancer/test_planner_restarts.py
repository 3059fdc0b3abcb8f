"""The planner after restarts of balancer, monitor or servers, and after failed calls."""

from __future__ import annotations

import numpy as np
import pytest

from balancer.planner.actions import Inspect, Prepare, Retire
from balancer.planner.layout import Layout, Settings
from balancer.planner.planner import Planner
from placement_world import (
    FULL,
    SERVING,
    client,
    kinds,
    server,
    settled,
    view,
)


def test_a_balancer_that_starts_in_a_running_cluster_asks_and_changes_nothing() -> None:
    world = settled("s1", "s2", "s3")
    before = world.published
    world.loads = 0
    world.start_balancer()
    assert kinds(world) == sorted(((Inspect, f"s{i}") for i in (1, 2, 3)), key=str)
    world.assert_settles()
    assert world.published.epoch == 1001
    assert world.loads == 0
    assert (world.published.holds_LSE == before.holds_LSE).all()


@pytest.mark.parametrize(("told", "epoch"), [(0, 8), (9, 10)])
def test_it_goes_above_every_epoch_that_anybody_knows_or_was_told(told: int, epoch: int) -> None:
    planner = Planner(2, Layout(Settings(redundancy=1)))
    members = view(server("s1", SERVING, epoch=4), server("s2"), client("c", epoch=7))
    first, second = planner.observe(members, 0.0)
    assert isinstance(first, Inspect)
    planner.succeeded(first, np.ones(FULL, dtype=bool), 4)
    assert planner.tick(0.0) == []
    planner.succeeded(second, np.zeros(FULL, dtype=bool), told)
    prepare, _ = planner.tick(0.0)
    assert prepare.placement.epoch == epoch


def test_it_waits_a_while_for_servers_that_a_restarted_monitor_does_not_know_yet() -> None:
    world = settled("s1", "s2", "s3")
    late = {name: world.members.pop(name) for name in ("s2", "s3")}
    world.start_balancer()
    assert world.calls == []
    world.members |= late
    world.notify()
    assert len(world.calls) == 3
    world.assert_settles()


# -- a monitor that forgot everything gives incarnations out again ------------------------------------


@pytest.mark.parametrize("address", ["", "s2:1"], ids=["another address", "all is equal"])
@pytest.mark.parametrize("seen_dead", [True, False])
def test_a_new_process_with_an_incarnation_that_was_there_gets_its_share(
    address: str, seen_dead: bool
) -> None:
    world = settled("s1", "s3")
    world.start("s2", 1, "s2:1")
    world.settle()
    if seen_dead:
        world.die("s2")
    world.start("s2", 1, address)
    assert (Prepare, "s2") in kinds(world)
    world.assert_settles()


def test_a_new_process_with_an_equal_incarnation_comes_while_the_old_one_loads() -> None:
    world = settled("s1", "s3")
    world.start("s2", 1)
    late = [c for c in world.calls if c[1].server_id == "s2"]
    world.start("s2", 1)
    assert [c.server_id for _, c in world.calls].count("s2") == 2
    # What was told to the old one says nothing of the new one.
    world.planner.succeeded(late[0][1])
    world.wait(0.0)
    world.assert_settles()


# -- a server that only the balancer cannot reach ------------------------------------------------------


def test_an_unreachable_server_does_not_delay_a_retirement() -> None:
    world = settled("s1", "s2", "s3")
    world.start("s4")
    world.answer_all()
    world.unreachable = {"s1"}
    world.settle()
    assert [type(call) for _, call in world.vain] == [Retire], "it is told on"
    world.start("s5")
    world.settle()
    # It cannot be told of the new placement, so others take its share.
    assert world.published.servers == ("s2", "s3", "s4", "s5")
    assert world.covered(world.published).all()
    assert [r.refused for r in world.refusals] == ["s1"]
