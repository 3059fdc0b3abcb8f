"""Folding the monitor's stream into views."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from eaas.membership.cluster_view import RETURN_GRACE_S, MembershipFold, MembershipView
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.types import Member, MemberState, Role

SERVING, DEAD = MemberState.SERVING, MemberState.DEAD


def member(name: str, state: MemberState = SERVING, incarnation: int = 1) -> Member:
    role = Role.EXPERT_SERVER
    return Member(name, role, 1, "h", f"{name}:1", state, incarnation=incarnation)


def snapshot(life: int, revision: int, *members: Member) -> pb.WatchResponse:
    messages = [m.to_proto() for m in members]
    return pb.WatchResponse(snapshot=pb.Snapshot(revision=revision, members=messages, life=life))


def event(revision: int, changed: Member) -> pb.WatchResponse:
    return pb.WatchResponse(event=pb.MemberEvent(revision=revision, member=changed.to_proto()))


def still(revision: int) -> pb.WatchResponse:
    return pb.WatchResponse(still_at_revision=revision)


def states(view: MembershipView) -> dict[str, MemberState]:
    return {name: m.state for name, m in view.members.items()}


def test_snapshot_then_events() -> None:
    fold = MembershipFold()
    assert (fold.view.members, fold.view.age_s(5.0)) == ({}, math.inf)
    assert (fold.position.from_revision, fold.position.life) == (0, 0)
    assert fold.take(snapshot(7, 3, member("a")), 10.0)
    assert (fold.position.from_revision, fold.position.life) == (3, 7)
    first = fold.view
    assert fold.take(event(4, member("b")), 11.0)
    assert list(first.members) == ["a"], "views are immutable"
    assert fold.take(event(5, member("a", DEAD)), 12.0)
    assert states(fold.view) == {"a": DEAD, "b": SERVING}
    assert [m.id for m in fold.view.live(Role.EXPERT_SERVER)] == ["b"]
    assert fold.view.live(Role.BALANCER) == ()
    before = fold.view
    assert not fold.take(still(5), 13.0)
    assert (fold.view.age_s(13.5), before.age_s(13.5)) == (0.5, 1.5)
    assert (fold.view.revision, states(fold.view)) == (5, states(before))


def test_a_second_snapshot_does_not_extend_the_time_to_return() -> None:
    fold = MembershipFold()
    fold.take(snapshot(7, 3, member("a"), member("b"), member("c")), 0.0)
    fold.take(snapshot(8, 0, member("c")), 60.0)
    fold.take(snapshot(8, 1, member("a")), 61.0)
    # c came and went; b is still awaited.
    assert states(fold.view) == {"a": SERVING, "b": SERVING, "c": DEAD}
    fold.take(still(1), 60.0 + RETURN_GRACE_S)
    assert states(fold.view) == {"a": SERVING, "b": DEAD, "c": DEAD}


def test_a_member_missing_in_a_snapshot_is_dead() -> None:
    """13: a client dies holding slots: ... reclaimed within W, though its tombstone was not seen."""
    fold = MembershipFold()
    fold.take(snapshot(7, 3, member("a"), member("b")), 0.0)
    assert fold.take(snapshot(7, 2000, member("b")), 1.0)
    assert states(fold.view) == {"a": DEAD, "b": SERVING}
    # Then it is forgotten: views do not grow for ever.
    assert fold.take(snapshot(7, 4000, member("b")), 2.0)
    assert states(fold.view) == {"b": SERVING}


def test_members_of_a_restarted_monitor_have_time_to_return() -> None:
    """9: monitor down 60 s: ... no flapping when it is back."""
    fold = MembershipFold()
    fold.take(snapshot(7, 3, member("a"), member("b"), member("dead", DEAD)), 0.0)
    fold.take(snapshot(8, 1, member("m")), 60.0)
    assert states(fold.view) == {"a": SERVING, "b": SERVING, "m": SERVING}
    assert not fold.take(event(2, member("a")), 61.0)
    assert not fold.take(still(2), 60.0 + RETURN_GRACE_S - 0.01)
    assert fold.take(still(2), 60.0 + RETURN_GRACE_S)
    assert states(fold.view) == {"a": SERVING, "b": DEAD, "m": SERVING}
    assert fold.take(event(3, member("b", incarnation=2)), 70.0)
    assert not fold.take(still(3), 80.0)
    assert states(fold.view) == {"a": SERVING, "b": SERVING, "m": SERVING}


def test_an_unknown_role_changes_nothing() -> None:
    fold = MembershipFold()
    fold.take(snapshot(7, 1, member("a")), 0.0)
    message = event(2, replace(member("b")))
    message.event.member.role = 99  # type: ignore[assignment]
    with pytest.raises(ValueError, match="99"):
        fold.take(message, 1.0)
    assert fold.view.revision == 1
