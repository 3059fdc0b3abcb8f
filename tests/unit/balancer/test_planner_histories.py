"""Roll-outs cut short at every step, in any order: nobody loses an expert to the balancer."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement_world import DRAINING, GRACE_S, World, settled

NAMES = ("s1", "s2", "s3", "s4", "s5")


def play(world: World, dice: random.Random, steps: int) -> None:
    """Anything may happen, in any order; `World` looks that nobody loses an expert to the balancer."""
    for _ in range(steps):
        what = dice.random()
        up = world.up()
        staying = [n for n in up if world.members[n].state is not DRAINING]
        if world.calls and what < 0.6:
            world.answer(dice.randrange(len(world.calls)), fail=dice.random() < 0.1)
        elif what < 0.7:
            world.follow(dice.choice(("c", "d")))
        elif what < 0.8:
            down = [n for n in NAMES if n not in up]
            if down:
                world.start(dice.choice(down))
        elif what < 0.87 and len(staying) > 1:
            world.die(dice.choice(up))
        elif what < 0.92 and len(staying) > 1:
            world.drain(dice.choice(staying))
        elif what < 0.95:
            world.start_balancer()
        elif what < 0.98:
            world.leave_where_empty()
        else:
            # Less than the clients' time: they are heard of before.
            world.wait(1.0)


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    servers=st.integers(1, 4),
    redundancy=st.integers(1, 3),
    steps=st.integers(0, 150),
)
def test_any_history_ends_even_covered_and_followed(
    seed: int, servers: int, redundancy: int, steps: int
) -> None:
    world = settled(*NAMES[:servers], redundancy=min(redundancy, servers), clients=("c", "d"))
    play(world, random.Random(seed), steps)
    for _ in range(3):
        world.settle()
        world.wait(GRACE_S + 1)
    world.settle()
    world.assert_settled()


def roll_outs() -> list[str]:
    return ["join", "drain", "death", "orphans"]


@pytest.mark.parametrize("crash", ["balancer", "source", "sink"])
@pytest.mark.parametrize("what", roll_outs())
def test_a_crash_at_every_step_of_a_roll_out(what: str, crash: str) -> None:
    """After n steps, for each n: the balancer dies, or a server that gives, or one that takes."""
    for step in range(100):
        world = settled("s1", "s2", "s3", redundancy=1 if what == "orphans" else 2)
        if what == "join":
            world.start("s4")
        elif what == "drain":
            world.drain("s3")
        else:
            world.die("s3")
            world.wait(GRACE_S if what == "death" else 0.0)
        done = 0
        while done < step and (world.calls or world.follows["c"] is not world.published):
            if world.calls:
                world.answer()
            else:
                world.follow("c")
            done += 1
        if crash == "balancer":
            world.start_balancer()
        else:
            world.die("s1" if crash == "source" else world.up()[-1])
        for _ in range(3):
            world.settle()
            world.wait(GRACE_S + 1)
        world.settle()
        world.assert_settled()
        if done < step:
            return
    raise AssertionError("the roll-out never ended")
