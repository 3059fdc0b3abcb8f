"""Roll-outs cut short at every step, in any order: no client loses an expert to the balancer."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from placement_world import GRACE_S, LONGEST_UNABLE_S, SERVING, play, settled

NAMES = ("s1", "s2", "s3", "s4", "s5")


@given(
    seed=st.integers(0, 2**32),
    servers=st.integers(1, 4),
    redundancy=st.integers(1, 3),
    steps=st.integers(0, 150),
)
# The order of the servers is that in which they came.
@example(seed=109, servers=2, redundancy=2, steps=104)
def test_any_history_ends_even_covered_and_followed(
    seed: int, servers: int, redundancy: int, steps: int
) -> None:
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
