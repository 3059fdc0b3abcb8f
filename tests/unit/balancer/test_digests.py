"""Digests of experts' bytes if servers disagree: the decision, and the planner's actions."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.planner.actions import Inspect, Process
from balancer.planner.digests import ExpertDigests
from placement_world import DEAD, RIGHT_LE, SERVING, World, settled


def process(name: str) -> Process:
    return (name, 1, "h", 1, "a", 1)


def decided(**stated: list[int]) -> list[int]:
    book = ExpertDigests()
    for name, digests in stated.items():
        book.state(process(name), np.array([digests], np.uint64))
    book.decide([process(name) for name in stated])
    assert book.known_LE is not None
    return book.known_LE[0].tolist()


# -- the book -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", list(itertools.permutations("abx")))
def test_the_server_that_several_contradict_is_wrong(order: tuple[str, ...]) -> None:
    """Each expert is on two servers: a single expert does not tell which server is right."""
    stated = {"a": [1, 2, 0], "b": [0, 2, 3], "x": [7, 0, 8]}
    assert decided(**{name: stated[name] for name in order}) == [1, 2, 3]


def test_between_two_the_first_is_right() -> None:
    assert decided(a=[1, 2, 0], b=[1, 5, 6]) == [1, 2, 6]
    assert decided(b=[1, 5, 6], a=[1, 2, 0]) == [1, 5, 6]


@given(st.data())
def test_a_minority_of_damaged_copies_is_outvoted(data: st.DataObject) -> None:
    """Every expert on all servers, and most of them right."""
    right = data.draw(st.integers(2, 5))
    wrong = data.draw(st.integers(0, right - 1))
    top = (1 << 64) - 1
    truth = np.array(data.draw(st.lists(st.integers(1, top), min_size=3, max_size=3)), np.uint64)
    stated = [truth.copy() for _ in range(right)]
    for _ in range(wrong):
        stated.append(truth.copy())
        stated[-1][data.draw(st.integers(0, 2))] ^= np.uint64(1 << data.draw(st.integers(0, 63)))
    book = ExpertDigests()
    for number in data.draw(st.permutations(range(len(stated)))):
        book.state(process(str(number)), stated[number].reshape(1, 3))
    book.decide([process(str(number)) for number in range(len(stated))])
    assert book.known_LE is not None
    assert (book.known_LE[0] == truth).all()


# -- the planner ----------------------------------------------------------------------------------------


def damage(world: World, name: str, *places: tuple[int, int]) -> None:
    """Single experts of a server's copy, or all of them."""
    if not places:
        world.copies[name] = RIGHT_LE + np.uint64(1000)
    for place in places:
        world.copies[name][place] += np.uint64(1000)


@pytest.mark.parametrize("damaged", ["s1", "s2", "s3"])
@pytest.mark.parametrize("turns", list(itertools.permutations(range(3))))
def test_a_damaged_copy_is_found_at_a_cold_start(damaged: str, turns: tuple[int, ...]) -> None:
    world = World(3, 2)
    damage(world, damaged)
    for name in ("s1", "s2", "s3"):
        world.start(name)
    calls = [world.calls[turn] for turn in turns]
    world.calls[:] = calls
    world.settle()
    assert [(r.refused, r.reason) for r in world.refusals] == [(damaged, "differs")]
    assert world.members[damaged].state is DEAD
    world.assert_settled()
    # And it comes back, with a copy that is right.
    world.copies[damaged] = RIGHT_LE.copy()
    world.start(damaged)
    world.assert_settles()


def test_a_damaged_newcomer_changes_nothing() -> None:
    world = settled("s1", "s2", "s3")
    before = world.published
    damage(world, "s4")
    world.start("s4")
    world.settle()
    assert [r.refused for r in world.refusals] == ["s4"]
    assert world.published.servers == before.servers
    assert (world.published.holds_LSE == before.holds_LSE).all()
    world.assert_settled()


def test_a_serving_server_with_damage_keeps_its_experts_and_gets_no_more() -> None:
    world = settled("s1", "s2", redundancy=1)
    (lost_LE,) = (world.stores[name].copy() for name in ("s2",))
    damage(world, "s1", *map(tuple, np.argwhere(lost_LE)[:1].tolist()))
    kept_LE = world.stores["s1"].copy()
    world.die("s2")
    for _ in range(20):
        world.answer_all()
        world.wait(60.0)
    assert not world.calls, "it is not asked again and again"
    assert [r.refused for r in world.refusals] == ["s1"]
    assert (world.stores["s1"] >= kept_LE).all()
    assert world.members["s1"].state is SERVING
    # Another one takes all over.
    world.start("s3")
    world.settle()
    assert world.published.servers == ("s3",)
    assert world.covered(world.published).all()


def test_digests_are_learned_from_a_leaving_server() -> None:
    world = settled("s1", "s2", redundancy=1)
    held_LE = world.stores["s2"].copy()
    world.drain("s2")
    world.calls.clear()
    damage(world, "s3", *map(tuple, np.argwhere(held_LE).tolist()))
    world.start_balancer()
    assert {call.server_id for _, call in world.calls if isinstance(call, Inspect)} == {"s1", "s2"}
    world.start("s3")
    world.settle()
    assert [r.refused for r in world.refusals] == ["s3"]
    assert world.covered(world.published).all()


def test_digests_never_compared_do_not_count_for_a_new_balancer() -> None:
    """It had loaded its share when the previous balancer ended."""
    world = settled("s1", redundancy=1)
    damage(world, "s3", (0, 0))
    world.start("s3")
    world.stores["s3"][:] = True
    world.calls.clear()
    world.start_balancer()
    # Its answer comes first.
    world.calls.sort(key=lambda c: c[1].server_id, reverse=True)
    world.settle()
    assert [r.refused for r in world.refusals] == ["s3"]
