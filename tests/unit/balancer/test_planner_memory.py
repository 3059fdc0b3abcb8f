"""Servers come, leave and die with scarce memory: no server is told to hold more than it can."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from placement_world import DRAINING, FULL, World

EXPERTS = FULL[0] * FULL[1]
NAMES = ("s1", "s2", "s3", "s4")


def started(*names: str, room: int, redundancy: int = 2) -> World:
    world = World(len(names), redundancy)
    world.capacity = dict.fromkeys(NAMES, room)
    for name in names:
        world.start(name)
    world.answer_all()
    world.follow("c")
    world.settle()
    return world


def is_right(world: World) -> None:
    placement = world.published
    assert placement is not None
    assert world.covered(placement).all()
    assert not world.overfull
    for s, name in enumerate(placement.servers):
        assert (world.stores[name] == placement.holds_LSE[:, s]).all()
        assert world.stores[name].sum() <= world.capacity[name]
    assert ((placement.shares_LSE > 0) == placement.holds_LSE).all()


@pytest.mark.parametrize("room", [4, 6, 12])
def test_joins_and_deaths_with_a_cap_that_binds(room: int) -> None:
    """Two replicas of each expert are 24, on three servers: a capacity of 4 allows one each, 6 some more."""
    world = started("s1", "s2", "s3", room=room)
    is_right(world)
    assert world.published.holds_LSE.sum() == min(3 * room, 2 * EXPERTS)
    world.start("s4")
    world.settle()
    is_right(world)
    assert world.stores["s4"].any(), "who comes gets a part"
    world.die("s2")
    world.rest(1)
    is_right(world)


def test_orphans_go_where_spare_replicas_make_room() -> None:
    """Redundancy 1, so that each death leaves orphans; the others are full of spare replicas by then."""
    world = started("s1", "s2", "s3", room=6)
    world.die("s3")
    world.settle()
    is_right_but_for_the_dead(world)
    world.die("s2")
    world.settle()
    # Six of twelve fit on the one that is left: those stay, and somebody is told.
    assert not world.overfull
    assert len(world.complaints) == 1
    assert "no server has memory" in world.complaints[0].reason
    world.start("s2")
    world.settle()
    is_right_but_for_the_dead(world)


def is_right_but_for_the_dead(world: World) -> None:
    assert world.published is not None
    assert not world.overfull
    held_LE = np.any([world.stores[n] for n in world.up()], axis=0)
    assert held_LE.all()
    assert world.covered(world.published).all()


def test_too_little_memory_for_all_experts() -> None:
    world = World(3, 1)
    world.capacity = dict.fromkeys(NAMES, 3)
    for name in NAMES[:3]:
        world.start(name)
    world.settle()
    assert world.published is None
    (complaint,) = world.complaints
    assert "12 experts, and memory for 9 on 3 servers" in complaint.reason
    world.start("s4")
    world.settle()
    assert world.covered(world.published).all()
    assert not world.overfull


def test_a_server_needed_for_its_memory_cannot_drain() -> None:
    world = started("s1", "s2", "s3", room=4, redundancy=1)
    why = world.planner.cordon("s1")
    assert why is not None
    assert "without s1 there is memory for 8 of 12 experts" in why
    world.start("s4")
    world.settle()
    assert world.planner.cordon("s1") is None


@given(
    seed=st.integers(0, 2**32),
    steps=st.integers(0, 100),
    room=st.integers(6, 12),
    redundancy=st.integers(1, 3),
)
def test_in_any_history_no_server_exceeds_its_memory(seed, steps, room, redundancy) -> None:
    rng = random.Random(seed)
    world = started("s1", "s2", "s3", room=room, redundancy=redundancy)
    for _ in range(steps):
        what, up = rng.random(), world.up()
        staying = [n for n in up if world.members[n].state is not DRAINING]
        if world.calls and what < 0.65:
            world.answer(rng.randrange(len(world.calls)), fail=rng.random() < 0.05)
        elif what < 0.75:
            world.follow("c")
        elif what < 0.85 and len(staying) > 2:
            world.die(rng.choice(staying))
        elif what < 0.92 and (down := [n for n in NAMES if n not in up]):
            world.start(rng.choice(down))
        elif what < 0.96 and len(staying) > 2:
            world.drain(rng.choice(staying))
        else:
            world.wait(1.0)
        assert not world.overfull
    for name in NAMES:
        if name not in world.up():
            world.start(name)
    world.rest(6)
    is_right(world)
