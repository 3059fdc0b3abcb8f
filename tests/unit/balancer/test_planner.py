"""The planner's decisions, case by case and under random histories."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from balancer.planner import Action, Apply, Planner, Publish, Refuse
from eaas.types import Member, MemberState, ModelShape, Placement, Role

JOINING, SERVING, DEAD = MemberState.JOINING, MemberState.SERVING, MemberState.DEAD
SHAPE = ModelShape("tiny", 8, 64, 2, ("l0", "l1"), "float32", "digest-a")
OTHER = replace(SHAPE, digest="digest-b")


def server(
    name: str,
    state: MemberState = JOINING,
    incarnation: int = 1,
    model: ModelShape | None = SHAPE,
    epoch: int = 0,
) -> Member:
    return Member(
        name,
        Role.EXPERT_SERVER,
        1,
        "h",
        f"{name}:1",
        state,
        incarnation=incarnation,
        model=model,
        epoch=epoch,
    )


def view(*members: Member) -> dict[str, Member]:
    return {m.id: m for m in members}


def applies(actions: list[Action]) -> dict[str, Apply]:
    return {a.server_id: a for a in actions if isinstance(a, Apply)}


def published(actions: list[Action]) -> Placement | None:
    found = [a.placement for a in actions if isinstance(a, Publish)]
    assert len(found) <= 1
    return found[0] if found else None


def settled(*names: str) -> tuple[Planner, Placement]:
    planner = Planner(len(names), 2)
    actions = planner.observe(view(*map(server, names)))
    for apply in applies(actions).values():
        actions = planner.applied(apply)
    placement = published(actions)
    assert placement is not None
    return planner, placement


def test_it_waits_for_the_expected_servers_then_applies_then_publishes() -> None:
    planner = Planner(3, 2)
    client = Member("c", Role.ATTENTION_CLIENT, 1, "h", "c:1", SERVING, model=SHAPE)
    assert planner.observe({}) == []
    assert planner.observe(view(client, server("s1"), server("s2"))) == []
    asked = applies(planner.observe(view(client, server("s1"), server("s2"), server("s3"))))
    assert sorted(asked) == ["s1", "s2", "s3"]
    assert {a.placement.epoch for a in asked.values()} == {1}
    assert asked["s2"].address == "s2:1"
    assert planner.observe(view(server("s1"), server("s2"), server("s3"))) == []
    assert planner.applied(asked["s1"]) == []
    assert planner.applied(asked["s3"]) == []
    placement = published(planner.applied(asked["s2"]))
    assert placement is not None
    assert (placement.epoch, placement.servers) == (1, ("s1", "s2", "s3"))
    assert (placement.holds_LSE.sum(axis=1) == 2).all()
    now = view(*(server(f"s{i}", SERVING, epoch=1) for i in (1, 2, 3)))
    assert planner.observe(now) == []


def test_a_server_that_comes_back_is_told_its_share() -> None:
    planner, placement = settled("s1", "s2")
    assert planner.observe(view(server("s1", SERVING, epoch=1), server("s2", DEAD))) == []
    back = view(server("s1", SERVING, epoch=1), server("s2", incarnation=2))
    (apply,) = planner.observe(back)
    assert isinstance(apply, Apply)
    assert (apply.server_id, apply.incarnation) == ("s2", 2)
    assert apply.placement is placement
    assert planner.observe(back) == []
    assert planner.applied(apply) == []


def test_a_server_that_woke_with_its_weights_is_left_alone() -> None:
    planner, _ = settled("s1", "s2")
    woken = server("s2", SERVING, incarnation=2, epoch=1)
    assert planner.observe(view(server("s1", SERVING, epoch=1), woken)) == []


def test_a_server_that_is_not_placed_is_told_to_hold_nothing() -> None:
    planner, placement = settled("s1", "s2")
    (apply,) = planner.observe(view(server("s1"), server("s2"), server("s3")))
    assert isinstance(apply, Apply)
    assert apply.server_id == "s3"
    assert apply.placement is placement
    assert placement.experts_of("s3") == ((), ())


def test_a_server_of_another_model_is_refused_once_for_each_life() -> None:
    planner = Planner(2, 1)
    odd = server("s0", model=OTHER)
    actions = planner.observe(view(odd, server("s1"), server("s2")))
    (refusal,) = (a for a in actions if isinstance(a, Refuse))
    assert refusal.server_id == "s0"
    assert "digest-b" in refusal.reason
    assert "digest-a" in refusal.reason
    assert sorted(applies(actions)) == ["s1", "s2"]
    assert planner.observe(view(odd, server("s1"), server("s2"))) == []
    again = planner.observe(view(replace(odd, incarnation=2), server("s1"), server("s2")))
    assert [type(a) for a in again] == [Refuse]


def test_servers_of_two_models_do_not_add_up() -> None:
    planner = Planner(2, 1)
    actions = planner.observe(view(server("s1"), server("s2", model=OTHER)))
    assert [a.server_id for a in actions if isinstance(a, Refuse)] == ["s2"]
    assert applies(actions) == {}
    assert applies(planner.observe(view(server("s1", model=None), server("s2")))) == {}


def test_a_loss_before_publication_makes_a_new_draft_with_a_higher_epoch() -> None:
    planner = Planner(2, 2)
    first = applies(planner.observe(view(server("s1"), server("s2"))))
    planner.applied(first["s1"])
    assert planner.observe(view(server("s1", SERVING, epoch=1), server("s2", DEAD))) == []
    assert not planner.is_wanted(first["s1"])
    assert not planner.is_wanted(first["s2"])
    third = view(server("s1", SERVING, epoch=1), server("s2", DEAD), server("s3"))
    second = applies(planner.observe(third))
    assert sorted(second) == ["s1", "s3"]
    assert {a.placement.epoch for a in second.values()} == {2}
    # A late answer to the first draft changes nothing.
    assert planner.applied(first["s1"]) == []
    assert planner.applied(second["s1"]) == []
    assert published(planner.applied(second["s3"])) is not None


def test_a_restarted_balancer_goes_above_the_epochs_that_servers_hold() -> None:
    planner = Planner(2, 2)
    asked = applies(
        planner.observe(view(server("s1", SERVING, epoch=4), server("s2", SERVING, epoch=3)))
    )
    assert {a.placement.epoch for a in asked.values()} == {5}


def test_a_replaced_life_must_apply_again_before_publication() -> None:
    planner = Planner(2, 2)
    asked = applies(planner.observe(view(server("s1"), server("s2"))))
    planner.applied(asked["s1"])
    (again,) = planner.observe(view(server("s1", incarnation=2), server("s2")))
    assert isinstance(again, Apply)
    assert not planner.is_wanted(asked["s1"])
    assert planner.applied(asked["s2"]) == []
    assert published(planner.applied(again)) is not None


def test_a_failed_attempt_is_wanted_while_the_server_lives() -> None:
    planner = Planner(2, 2)
    asked = applies(planner.observe(view(server("s1"), server("s2"))))
    assert planner.is_wanted(asked["s1"])
    planner.observe(view(server("s1", MemberState.SUSPECT), server("s2")))
    assert planner.is_wanted(asked["s1"])
    planner.observe(view(server("s1", DEAD), server("s2")))
    assert not planner.is_wanted(asked["s1"])


def test_a_returned_server_that_dies_again_is_left_alone() -> None:
    planner, _ = settled("s1", "s2")
    (apply,) = planner.observe(view(server("s1", SERVING, epoch=1), server("s2", incarnation=2)))
    assert isinstance(apply, Apply)
    assert planner.is_wanted(apply)
    planner.observe(view(server("s1", SERVING, epoch=1), server("s2", DEAD, incarnation=2)))
    assert not planner.is_wanted(apply)


def test_more_redundancy_than_servers_is_an_error() -> None:
    with pytest.raises(ValueError, match="redundancy 3 is above expected_servers 2"):
        Planner(2, 3)


class History:
    """Servers that die, return and apply at random, with a planner that is told of it."""

    NAMES = ("s1", "s2", "s3", "s4")

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.planner = Planner(3, 2)
        self.lives = dict.fromkeys(self.NAMES, 0)
        self.up: dict[str, Member] = {}
        self.calls: list[Apply] = []
        self.epochs: list[int] = []

    def alive(self, name: str) -> bool:
        return name in self.up and self.up[name].state is not DEAD

    def take(self, actions: list[Action]) -> None:
        self.calls += applies(actions).values()
        placement = published(actions)
        if placement:
            assert not self.epochs or placement.epoch > self.epochs[-1]
            self.epochs.append(placement.epoch)

    def start(self, name: str) -> None:
        self.lives[name] += 1
        self.up[name] = server(name, incarnation=self.lives[name])

    def answer_a_call(self) -> None:
        call = self.calls.pop(self.rng.randrange(len(self.calls)))
        now = self.up.get(call.server_id)
        if now is None or now.incarnation != call.incarnation or now.state is DEAD:
            return
        if call.placement.epoch < now.epoch:  # The server refuses it.
            assert not self.planner.is_wanted(call)
            return
        self.up[call.server_id] = replace(now, state=SERVING, epoch=call.placement.epoch)
        self.take(self.planner.applied(call))

    def run(self) -> None:
        for step in range(60):
            name = self.rng.choice(self.NAMES)
            if self.calls and self.rng.random() < 0.5:
                self.answer_a_call()
            elif not self.alive(name):
                self.start(name)
            elif step < 40 and self.rng.random() < 0.3:
                self.up[name] = replace(self.up[name], state=DEAD)
            self.take(self.planner.observe(self.up))
        for name in self.NAMES:
            if not self.alive(name):
                self.start(name)
        self.take(self.planner.observe(self.up))
        while self.calls:
            self.answer_a_call()
            self.take(self.planner.observe(self.up))


@pytest.mark.parametrize("block", range(10))
def test_random_histories_end_placed_published_and_applied(block: int) -> None:
    for seed in range(block * 100, block * 100 + 100):
        history = History(seed)
        history.run()
        assert history.epochs, f"seed {seed}"
        assert {m.state for m in history.up.values()} == {SERVING}, f"seed {seed}"
        assert {m.epoch for m in history.up.values()} == {history.epochs[-1]}, f"seed {seed}"
