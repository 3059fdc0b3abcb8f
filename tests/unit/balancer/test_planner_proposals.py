"""Placements that somebody wants for the load's sake: the same roll-out, the same promises."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancer.actions import Prepare, Retire
from balancer.drafts import Draft
from balancer.live.away import with_the_dead
from eaas.types import Placement
from placement_world import DRAINING, FULL, GRACE_S, JOINING, SERVING, World, client, settled

L, E = FULL
NAMES = ("s1", "s2", "s3", "s4")


def draft(servers: tuple[str, ...], seed: int, spare: float = 0.3) -> Draft:
    """Any placement that covers, with any shares."""
    dice = np.random.default_rng(seed)
    holds_LSE = dice.random((L, len(servers), E)) < spare
    layer, expert = np.nonzero(~holds_LSE.any(axis=1))
    holds_LSE[layer, dice.integers(len(servers), size=len(layer)), expert] = True
    shares_LSE = np.where(holds_LSE, dice.random(holds_LSE.shape) + 0.01, 0)
    return Draft(servers, holds_LSE, shares_LSE / shares_LSE.sum(axis=1, keepdims=True))


def propose(world: World, *drafts: Draft) -> str | None:
    refusal = world.planner.propose(drafts, world.published.epoch)
    world.wait(0.0)
    return refusal


def rests_at(world: World, wanted: Draft) -> None:
    placement = world.published
    assert (placement.holds_LSE == wanted.holds_LSE).all()
    assert np.allclose(placement.shares_LSE, wanted.shares_LSE)
    for s, name in enumerate(placement.servers):
        assert (world.stores[name] == placement.holds_LSE[:, s]).all()
    assert {p.epoch for p in world.follows.values()} == {placement.epoch}
    assert world.planner.is_at_rest
    assert world.settled_epochs[-1] == placement.epoch


def test_a_proposal_is_rolled_out_and_stays() -> None:
    world = settled("s1", "s2", "s3")
    wanted = draft(("s1", "s2", "s3"), 1)
    assert propose(world, wanted) is None
    assert {type(c) for _, c in world.calls} == {Prepare}
    assert propose(world, wanted) == "a roll-out is going on"
    world.settle()
    rests_at(world, wanted)
    world.wait(100.0)
    assert world.calls == [], "however uneven it is"


def test_stages_come_one_after_another() -> None:
    world = settled("s1", "s2")
    stages = [draft(("s1", "s2"), seed) for seed in range(3)]
    assert propose(world, *stages) is None
    world.settle()
    assert world.published.epoch == 4
    assert world.settled_epochs == [1, 2, 3, 4]
    rests_at(world, stages[-1])


def test_a_proposal_has_time_and_what_was_lost_has_not() -> None:
    world = settled("s1", "s2", "s3")
    assert propose(world, draft(NAMES[:3], 1)) is None
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
    assert propose(world, draft(NAMES[:3], 2)) is None
    world.calls.clear()
    world.die("s2")
    assert world.calls
    assert not any(planner.has_time(call) for planner, call in world.calls)


def test_what_speaks_against_a_proposal() -> None:
    world = settled("s1", "s2")
    assert world.planner.propose([draft(("s1", "s2"), 1)], 7) == (
        "the placement is of epoch 1 by now, not 7"
    )
    assert propose(world, draft(("s1", "nobody"), 1)) == "nobody cannot be given experts now"
    assert world.calls == []
    world = World(2, 1)
    assert world.planner.propose([draft(("s1",), 1)], 0) == "there is no placement yet"


def test_layers_are_loaded_in_the_order_that_was_wanted() -> None:
    world = settled("s1", "s2")
    one = draft(("s1", "s2"), 1)
    assert propose(world, Draft(one.servers, one.holds_LSE, one.shares_LSE, (1, 0))) is None
    assert {c.layer_order for _, c in world.calls} == {(1, 0)}


def test_a_server_that_comes_or_dies_ends_the_stages() -> None:
    for strike in ("die", "start"):
        world = settled("s1", "s2", "s3", redundancy=1)
        stages = [draft(("s1", "s2", "s3"), seed) for seed in range(3)]
        assert propose(world, *stages) is None
        while world.published.epoch == 1:
            world.answer()
        getattr(world, strike)("s3" if strike == "die" else "s4")
        for _ in range(3):
            world.settle()
            world.wait(GRACE_S + 1)
        world.settle()
        assert world.planner.is_at_rest
        world.assert_settled()


def test_no_stage_begins_while_one_of_its_servers_is_dead() -> None:
    """What only that one is to have in the end others have until then."""
    world = settled("s1", "s2", "s3")
    first, second = draft(NAMES[:3], 1, spare=1.0), draft(NAMES[:3], 2, spare=0.0)
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


def without(servers: tuple[str, ...], dead: str, current: Placement, seed: int) -> Draft:
    """Any placement of the others that covers, and the dead one as it is."""
    others = tuple(s for s in servers if s != dead)
    return with_the_dead(draft(others, seed), current)


def test_the_others_are_balanced_while_one_is_dead() -> None:
    world = settled("s1", "s2", "s3")
    world.die("s3")
    world.settle()
    before = world.published
    held_LE = before.holds_LSE[:, before.servers.index("s3")]
    wanted = without(before.servers, "s3", before, 1)
    assert propose(world, wanted) is None
    world.settle()
    assert world.published.epoch > before.epoch
    assert (world.published.holds_LSE == wanted.holds_LSE).all()
    assert np.allclose(world.published.shares_LSE.sum(axis=1), 1)
    assert world.covered(world.published).all()
    assert (world.published.holds_LSE[:, world.published.servers.index("s3")] == held_LE).all()
    world.start("s3")
    world.settle()
    rests_at(world, wanted)


def test_a_dead_server_is_given_nothing() -> None:
    world = settled("s1", "s2", "s3")
    world.die("s3")
    world.settle()
    assert propose(world, draft(NAMES[:3], 1, spare=1.0)) == "s3 cannot be given experts now"
    assert world.planner.is_at_rest


def test_what_a_dead_server_has_is_not_left_to_it_alone() -> None:
    world = settled("s1", "s2", "s3")
    world.die("s3")
    world.settle()
    current = world.published
    wanted = without(current.servers, "s3", current, 1)
    s3 = wanted.servers.index("s3")
    alone_LSE = wanted.holds_LSE.copy()
    alone_LSE[:, :s3] &= ~wanted.holds_LSE[:, [s3]]
    shares_LSE = alone_LSE / alone_LSE.sum(axis=1, keepdims=True)
    assert propose(world, Draft(wanted.servers, alone_LSE, shares_LSE)) is None
    world.settle()
    assert world.published is current
    world.start("s3")
    world.settle()
    assert (world.published.holds_LSE == alone_LSE).all()


def test_an_even_placement_is_wanted_again() -> None:
    world = settled("s1", "s2")
    assert propose(world, draft(("s1", "s2"), 1)) is None
    world.settle()
    world.planner.level()
    world.wait(0.0)
    world.settle()
    world.assert_settled()


def test_a_balancer_that_remembers_goes_on_with_what_was_wanted() -> None:
    """Whatever step it died at: no expert is loaded twice, and the shares are those that were planned."""
    for step in range(60):
        world = settled("s1", "s2", "s3")
        world.remembers = True
        wanted = draft(("s1", "s2", "s3"), 5)
        assert propose(world, wanted) is None
        world.loads, done = 0, 0
        missing = wanted.holds_LSE.sum() - np.count_nonzero(
            wanted.holds_LSE & world.placements[1].holds_LSE
        )
        while done < step and (world.calls or world.follows["c"] is not world.published):
            if world.calls:
                world.answer()
            else:
                world.follow("c")
            done += 1
        world.start_balancer()
        world.settle()
        rests_at(world, wanted)
        assert world.loads == missing
        if done < step:
            return
    raise AssertionError("the roll-out never ended")


def test_what_was_wanted_of_servers_that_have_gone_is_laid_out_anew() -> None:
    world = settled("s1", "s2", "s3")
    world.remembers = True
    assert propose(world, draft(("s1", "s2", "s3"), 5)) is None
    world.settle()
    world.die("s2")
    world.start_balancer()
    world.wait(8.0)
    world.settle()
    assert world.covered(world.published).all()
    assert world.published.servers == ("s1", "s3")


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32), steps=st.integers(0, 150), remembers=st.booleans())
def test_any_history_with_proposals_ends_covered_and_followed(
    seed: int, steps: int, remembers: bool
) -> None:
    """`World` looks at each step that no client loses an expert to a retirement, and at each publication."""
    dice = random.Random(seed)
    world = settled("s1", "s2", "s3", clients=("c", "d"))
    world.remembers = remembers
    for _ in range(steps):
        what, up = dice.random(), world.up()
        staying = [n for n in up if world.members[n].state is not DRAINING]
        if world.calls and what < 0.6:
            world.answer(dice.randrange(len(world.calls)), fail=dice.random() < 0.05)
        elif what < 0.7:
            world.follow(dice.choice(("c", "d")))
        elif what < 0.85 and world.published is not None:
            servers = tuple(n for n in world.published.servers if n in staying)
            if servers:
                drafts = [draft(servers, dice.randrange(99)) for _ in range(dice.randrange(1, 3))]
                if dice.random() < 0.5:
                    # Those that are dead, or leave, keep what they have.
                    drafts = [with_the_dead(one, world.published) for one in drafts]
                propose(world, *drafts)
        elif what < 0.9 and len(staying) > 1:
            world.die(dice.choice(up))
        elif what < 0.95 and (down := [n for n in NAMES if n not in up]):
            world.start(dice.choice(down))
        elif what < 0.97:
            world.start_balancer()
        else:
            world.wait(1.0)
    for _ in range(4):
        world.settle()
        world.wait(GRACE_S + 1)
    world.settle()
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
    wanted = draft(("s1", "s2", "s3"), seed, spare=0.2)
    assert propose(world, wanted) is None
    world.settle()
    held_once = wanted.holds_LSE.sum(axis=1) == 1
    world.die("s3")
    while world.calls:
        world.answer()
    placement = world.published
    assert world.covered(placement).all()
    touched_LE = held_once & wanted.holds_LSE[:, 2]
    assert np.allclose(placement.shares_LSE.sum(axis=1), 1)
    kept = np.moveaxis(placement.shares_LSE, 1, 2)[~touched_LE]
    assert np.allclose(kept, np.moveaxis(wanted.shares_LSE, 1, 2)[~touched_LE], atol=1e-6)


def test_a_client_that_says_it_has_none_may_have_got_the_one_before() -> None:
    """Found by the simulation: it took the former placement up, and its word of that was on its way."""
    world = settled("s1", "s2", "s3")
    former = world.published
    world.members["late"] = client("late", state=JOINING)
    world.tell()
    world.start("s4")
    while world.published is former:
        world.answer()
    world.follow("c")
    assert not any(isinstance(call, Retire) for _, call in world.calls)
    world.follow("late")
    assert any(isinstance(call, Retire) for _, call in world.calls)
