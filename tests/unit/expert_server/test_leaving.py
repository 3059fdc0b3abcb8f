"""When a leaving server waits, and for what."""

from __future__ import annotations

import threading
import time

import pytest

from eaas.membership.cluster_view import MembershipView
from eaas.types import Member, MemberState, Role
from expert_server.leaving import Leaving, can_be_relieved

SERVING, DRAINING, DEAD = MemberState.SERVING, MemberState.DRAINING, MemberState.DEAD


def view(
    *others: MemberState,
    balancer: MemberState | None = SERVING,
    client: MemberState | None = SERVING,
) -> MembershipView:
    members = [Member("me", Role.EXPERT_SERVER, 1, "h", "", DRAINING)]
    members += [
        Member(f"s{i}", Role.EXPERT_SERVER, 1, "h", "", state) for i, state in enumerate(others)
    ]
    for role, state in ((Role.BALANCER, balancer), (Role.ATTENTION_CLIENT, client)):
        if state is not None:
            members.append(Member(role.value, role, 1, "h", "", state))
    return MembershipView(1, {m.id: m for m in members}, time.monotonic())


@pytest.mark.parametrize(
    ("members", "wanted"),
    [
        (view(SERVING), True),
        (view(MemberState.JOINING), True),
        (view(DRAINING, SERVING), True),
        (view(), False),
        (view(DRAINING, DEAD), False),
        (view(SERVING, balancer=None), False),
        (view(SERVING, balancer=DEAD), False),
        (view(SERVING, client=None), False),
        (view(SERVING, client=DEAD), False),
    ],
)
def test_whether_others_can_take_over(members: MembershipView, wanted: bool) -> None:
    assert can_be_relieved(members, "me", members.heard_at) is wanted


def test_no_take_over_while_the_monitor_is_silent() -> None:
    members = view(SERVING)
    assert can_be_relieved(members, "me", members.heard_at + 2.5)
    assert not can_be_relieved(members, "me", members.heard_at + 60.0)


class Server:
    def __init__(self, members: MembershipView, timeout_s: float = 60.0) -> None:
        self.held, self.in_flight = 5, 1
        self.members = members
        self.told: list[str] = []
        self.ended = threading.Event()
        self.leaving = Leaving(
            "me",
            lambda: self.members,
            lambda: self.held,
            lambda: self.in_flight,
            lambda: self.told.append("draining"),
            self.ended.set,
            timeout_s,
        )


def test_it_ends_without_experts_and_requests() -> None:
    server = Server(view(SERVING))
    server.leaving.start()
    server.leaving.start()
    assert not server.ended.wait(0.2)
    assert server.told == ["draining"]
    server.held = 0
    assert not server.ended.wait(0.2)
    server.in_flight = 0
    assert server.ended.wait(10)


def test_it_does_not_wait_if_no_other_server_can_take_over() -> None:
    server = Server(view(SERVING))
    server.in_flight = 0
    server.leaving.start()
    assert not server.ended.wait(0.2)
    server.members = view(DRAINING)
    assert server.ended.wait(10)


def test_the_drain_times_out() -> None:
    server = Server(view(SERVING), timeout_s=0.2)
    began = time.monotonic()
    server.leaving.start()
    assert server.ended.wait(10)
    assert time.monotonic() - began > 0.2
