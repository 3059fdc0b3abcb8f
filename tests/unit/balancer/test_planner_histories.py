"""The planner after restarts and failed calls, and in any history."""

import random

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from balancer.planner.actions import Inspect, Prepare, Retire
from balancer.planner.layout import Layout, Settings
from balancer.planner.planner import Planner
from placement_world import (
    FULL,
    GRACE_S,
    LONGEST_UNABLE_S,
    SERVING,
    client,
    kinds,
    play,
    server,
    settled,
    view,
)

NAMES = ("s1", "s2", "s3", "s4", "s5")


@given(
    seed=st.integers(0, 2**32),
    servers=st.integers(1, 4),
    redundancy=st.integers(1, 3),
    steps=st.integers(0, 150),
)
# The order of the servers is that in which they came.
@example(seed=109, servers=2, redundancy=2, steps=104)
def test_any_history_ends_even_covered_and_followed(seed, servers, redundancy, steps) -> None:
    world = settled(*NAMES[:servers], redundancy=min(redundancy, servers), clients=("c", "d"))
    play(world, random.Random(seed), steps, names=NAMES)
    # Once while some hear nothing, once more when all do.
    for long_s in (GRACE_S + 1, LONGEST_UNABLE_S + 1):
        world.rest(seconds=long_s)
        if any(world.members[n].state is SERVING for n in set(world.up()) - world.unreachable):
            assert world.published is not None
            assert world.covered(world.published).all()
        world.reconnect()
    world.rest()
    world.assert_settled()


@pytest.mark.parametrize("crash", ["balancer", "source", "sink"])
@pytest.mark.parametrize("what", ["join", "drain", "death", "orphans"])
def test_a_crash_at_every_step_of_a_roll_out(what: str, crash: str) -> None:
    """For each n, after n steps: the balancer, a source server or a target server dies."""
    for step in range(100):
        world = settled("s1", "s2", "s3", redundancy=1 if what == "orphans" else 2)
        if what == "join":
            world.start("s4")
        elif what == "drain":
            world.drain("s3")
        else:
            world.die("s3")
            world.wait(GRACE_S if what == "death" else 0.0)
        in_time = world.advance(step)
        if crash == "balancer":
            world.start_balancer()
        else:
            world.die("s1" if crash == "source" else world.up()[-1])
        world.rest()
        world.assert_settled()
        if not in_time:
            return
    raise AssertionError("the roll-out never ended")


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
