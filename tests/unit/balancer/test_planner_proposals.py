"""Proposed placements: the same roll-out, the same guarantees."""

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.planner.actions import Prepare, Retire
from balancer.planner.candidates import Candidate, with_the_dead
from placement_world import (
    DRAINING,
    FULL,
    JOINING,
    LONGEST_UNABLE_S,
    SERVING,
    World,
    client,
    play,
    settled,
)

L, E = FULL
NAMES = ("s1", "s2", "s3", "s4")


def candidate(servers: tuple[str, ...], seed: int, spare: float = 0.3) -> Candidate:
    """Any placement that covers, with any shares."""
    rng = np.random.default_rng(seed)
    holds_LSE = rng.random((L, len(servers), E)) < spare
    layer, expert = np.nonzero(~holds_LSE.any(axis=1))
    holds_LSE[layer, rng.integers(len(servers), size=len(layer)), expert] = True
    shares_LSE = np.where(holds_LSE, rng.random(holds_LSE.shape) + 0.01, 0)
    return Candidate(servers, holds_LSE, shares_LSE / shares_LSE.sum(axis=1, keepdims=True))


def propose(world: World, *candidates: Candidate) -> str | None:
    refusal = world.planner.propose(candidates, world.published.epoch)
    world.wait(0.0)
    return refusal


def rests_at(world: World, wanted: Candidate) -> None:
    placement = world.published
    assert (placement.holds_LSE == wanted.holds_LSE).all()
    assert np.allclose(placement.shares_LSE, wanted.shares_LSE)
    for s, name in enumerate(placement.servers):
        assert (world.stores[name] == placement.holds_LSE[:, s]).all()
    assert {p.epoch for p in world.follows.values()} == {placement.epoch}
    assert world.planner.is_at_rest
    assert world.completed_epochs[-1] == placement.epoch


def test_the_stages_of_a_proposal_are_rolled_out_one_after_another_and_the_last_one_stays() -> None:
    world = settled("s1", "s2", "s3")
    first, *others = (candidate(NAMES[:3], seed) for seed in range(3))
    assert propose(world, replace(first, layer_order=(1, 0)), *others) is None
    assert {(type(c), c.layer_order) for _, c in world.calls} == {(Prepare, (1, 0))}
    assert propose(world, first) == "a roll-out is going on"
    world.settle()
    assert world.published.epoch == 4
    assert world.completed_epochs == [1, 2, 3, 4]
    rests_at(world, others[-1])
    world.wait(100.0)
    assert world.calls == [], "however uneven it is"


def test_a_proposal_can_wait_and_a_repair_cannot() -> None:
    world = settled("s1", "s2", "s3")
    assert propose(world, candidate(NAMES[:3], 1)) is None
    assert all(planner.has_time(call) for planner, call in world.calls)
    while {type(call) for _, call in world.calls} != {Retire}:
        world.answer()
        world.follow("c")
    assert all(planner.has_time(call) for planner, call in world.calls)
    world.settle()
    world.die("s1")
    world.start("s1")
    calls = [call for _, call in world.calls if isinstance(call, Prepare)]
    assert calls
    assert not any(map(world.planner.has_time, calls)), "clients ask it for experts that it has not"
    world.settle()
    assert propose(world, candidate(NAMES[:3], 2)) is None
    world.calls.clear()
    world.die("s2")
    assert world.calls
    assert not any(planner.has_time(call) for planner, call in world.calls)


def test_proposal_refusals() -> None:
    world = settled("s1", "s2", "s3")
    assert world.planner.propose([candidate(("s1", "s2"), 1)], 7) == (
        "the placement is of epoch 1 by now, not 7"
    )
    assert propose(world, candidate(("s1", "nobody"), 1)) == "nobody cannot be given experts now"
    assert world.calls == []
    world.die("s3")
    world.settle()
    assert propose(world, candidate(NAMES[:3], 1, spare=1.0)) == "s3 cannot be given experts now"
    assert world.planner.is_at_rest
    world = World(2, 1)
    assert world.planner.propose([candidate(("s1",), 1)], 0) == "there is no placement yet"


def test_no_stage_begins_while_one_of_its_servers_is_dead() -> None:
    """Others keep the experts that only the dead server will have."""
    world = settled("s1", "s2", "s3")
    first, second = candidate(NAMES[:3], 1, spare=1.0), candidate(NAMES[:3], 2, spare=0.0)
    assert propose(world, first, second) is None
    while world.published is None or not (world.published.holds_LSE == first.holds_LSE).all():
        world.answer()
    alone_LE = second.holds_LSE[:, 2] & ~second.holds_LSE[:, :2].any(axis=1)
    assert alone_LE.any()
    assert first.holds_LSE[:, :2].any(axis=1).all()
    world.die("s3")
    world.settle()
    assert (world.published.holds_LSE == first.holds_LSE).all()
    assert world.covered(world.published).all()
    world.start("s3")
    world.settle()
    rests_at(world, second)


def test_only_the_dead_server_keeps_its_replicas() -> None:
    placement = settled("s1", "s2", "s3").published
    others, dead = candidate(("s1", "s2"), 1), ("s3",)
    found = with_the_dead(others, placement)
    assert (found.over(others.servers).holds_LSE == others.holds_LSE).all()
    assert (found.over(dead).holds_LSE == Candidate.of(placement).over(dead).holds_LSE).all()


def test_a_dead_server_is_never_the_only_holder() -> None:
    world = settled("s1", "s2", "s3")
    world.die("s3")
    world.settle()
    current = world.published
    wanted = with_the_dead(candidate(("s1", "s2"), 1), current)
    s3 = wanted.servers.index("s3")
    alone_LSE = wanted.holds_LSE.copy()
    alone_LSE[:, :s3] &= ~wanted.holds_LSE[:, [s3]]
    shares_LSE = alone_LSE / alone_LSE.sum(axis=1, keepdims=True)
    assert propose(world, Candidate(wanted.servers, alone_LSE, shares_LSE)) is None
    world.settle()
    assert world.published is current
    world.start("s3")
    world.settle()
    assert (world.published.holds_LSE == alone_LSE).all()


def test_level_makes_a_placement_even_again() -> None:
    world = settled("s1", "s2")
    assert propose(world, candidate(("s1", "s2"), 1)) is None
    world.settle()
    world.planner.level()
    world.wait(0.0)
    world.assert_settles()


def test_a_successor_continues_with_the_wanted_placement() -> None:
    """After a death at any step no expert is loaded twice, and shares are the planned ones."""
    for step in range(60):
        world = settled("s1", "s2", "s3")
        world.remembers = True
        wanted = candidate(("s1", "s2", "s3"), 5)
        assert propose(world, wanted) is None
        world.loads = 0
        missing = wanted.holds_LSE.sum() - np.count_nonzero(
            wanted.holds_LSE & world.placements[1].holds_LSE
        )
        in_time = world.advance(step)
        world.start_balancer()
        world.settle()
        rests_at(world, wanted)
        assert world.loads == missing
        if not in_time:
            return
    raise AssertionError("the roll-out never ended")


def test_a_wanted_placement_of_other_servers_is_laid_out_anew() -> None:
    world = settled("s1", "s2", "s3")
    world.remembers = True
    assert propose(world, candidate(("s1", "s2", "s3"), 5)) is None
    world.settle()
    world.die("s2")
    world.start_balancer()
    world.wait(8.0)
    world.settle()
    assert world.covered(world.published).all()
    assert world.published.servers == ("s1", "s3")


@given(seed=st.integers(0, 2**32), steps=st.integers(0, 150), remembers=st.booleans())
def test_any_history_with_proposals_ends_covered_and_followed(seed, steps, remembers) -> None:
    """`World` checks at each step and publication that no client loses an expert."""
    rng = random.Random(seed)
    world = settled("s1", "s2", "s3", clients=("c", "d"))
    world.remembers = remembers

    def propose_any() -> None:
        up = [n for n in world.up() if world.members[n].state is not DRAINING]
        placement = world.published
        if placement is None or not (servers := tuple(n for n in placement.servers if n in up)):
            return
        candidates = [candidate(servers, rng.randrange(99)) for _ in range(rng.randrange(1, 3))]
        if rng.random() < 0.5:
            # Those that are dead, or leave, keep what they have.
            candidates = [with_the_dead(one, placement) for one in candidates]
        propose(world, *candidates)

    play(world, rng, steps, names=NAMES, propose=propose_any)
    world.rest(2, LONGEST_UNABLE_S + 1)
    world.reconnect()
    world.rest(4, LONGEST_UNABLE_S + 1)
    if any(world.members[n].state is SERVING for n in world.up()):
        placement = world.published
        assert placement is not None
        assert set(placement.servers) == set(world.up())
        assert world.covered(placement).all()
        for s, name in enumerate(placement.servers):
            assert (world.stores[name] == placement.holds_LSE[:, s]).all()
        assert world.planner.is_at_rest


@pytest.mark.parametrize("seed", range(5))
def test_shares_of_what_stays_are_kept_where_experts_are_restored(seed: int) -> None:
    world = settled("s1", "s2", "s3")
    wanted = candidate(("s1", "s2", "s3"), seed, spare=0.2)
    assert propose(world, wanted) is None
    world.settle()
    held_once = wanted.holds_LSE.sum(axis=1) == 1
    world.die("s3")
    world.answer_all()
    placement = world.published
    assert world.covered(placement).all()
    touched_LE = held_once & wanted.holds_LSE[:, 2]
    assert np.allclose(placement.shares_LSE.sum(axis=1), 1)
    kept = np.moveaxis(placement.shares_LSE, 1, 2)[~touched_LE]
    assert np.allclose(kept, np.moveaxis(wanted.shares_LSE, 1, 2)[~touched_LE], atol=1e-6)


def test_a_client_that_says_it_has_none_may_have_got_the_one_before() -> None:
    """Found by simulation: it had adopted the former placement, and its report was in flight."""
    world = settled("s1", "s2", "s3")
    former = world.published
    world.members["late"] = client("late", state=JOINING)
    world.notify()
    world.start("s4")
    while world.published is former:
        world.answer()
    world.follow("c")
    assert not any(isinstance(call, Retire) for _, call in world.calls)
    world.follow("late")
    assert any(isinstance(call, Retire) for _, call in world.calls)
