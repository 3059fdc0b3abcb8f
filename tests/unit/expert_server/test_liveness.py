"""A server that stalls, and one that leaves."""

import threading
import time

import pytest

from eaas.membership.cluster_view import MembershipView
from eaas.types import Member, MemberState, Role
from expert_server.leaving import Leaving, can_be_relieved
from expert_server.loop.liveness import Liveness, Watchdog

PATIENCE_S, MOST_S = 1.6, 10.0


class World:
    """A watchdog that checks when the test calls it."""

    def __init__(self) -> None:
        self.now = 100.0
        self.liveness = Liveness(self.now)
        self.changes: list[float] = []
        self.watchdog = Watchdog(
            self.liveness, lambda: self.changes.append(self.watchdog.stalled_s), lambda: self.now
        )

    def look_for(self, seconds: float) -> None:
        for _ in range(round(seconds / 0.1)):
            self.now += 0.1
            self.watchdog.check()

    def batch(self, tokens: int, seconds: float) -> None:
        self.liveness.begins(tokens, self.now)
        self.liveness.ended(tokens, seconds)
        self.liveness.turns(self.now)


def test_a_loop_that_turns_has_not_stalled() -> None:
    world = World()
    for _ in range(100):
        world.liveness.turns(world.now)
        world.look_for(0.5)
    assert world.changes == []


def test_sleeping_is_not_a_stall() -> None:
    world = World()
    world.liveness.turns(world.now + 5.0)
    world.look_for(5.0 + PATIENCE_S - 0.15)
    assert world.changes == []
    world.look_for(0.4)
    assert len(world.changes) == 1


def test_a_stalled_batch_and_its_end_are_noticed() -> None:
    world = World()
    world.batch(4, 0.002)
    world.liveness.begins(4, world.now)
    world.look_for(PATIENCE_S - 0.15)
    assert world.changes == []
    world.look_for(0.3)
    assert PATIENCE_S <= world.changes[0] < PATIENCE_S + 0.2
    world.look_for(5.0)
    assert world.watchdog.stalled_s > 5.0
    world.liveness.turns(world.now)
    world.look_for(0.1)
    assert world.changes[1:] == [0.0]


@pytest.mark.parametrize(
    ("before", "tokens", "patience_s"),
    [
        # Decoding takes 5 ms per token: 200 tokens take at most a second, and may take four.
        ([0.005] * 50, 200, 4.0),
        ([1.0], 4096, MOST_S),
        ([], 1, MOST_S),
        # One slow batch is forgotten.
        ([2.0] + [0.001] * 400, 1, PATIENCE_S),
    ],
    ids=["grows with the tokens", "bounded", "first batch", "slow batch"],
)
def test_the_patience_with_a_batch(before: list[float], tokens: int, patience_s: float) -> None:
    world = World()
    for seconds in before:
        world.batch(1, seconds)
    world.liveness.begins(tokens, world.now)
    world.look_for(patience_s - 0.15)
    assert world.changes == []
    world.look_for(0.3)
    assert len(world.changes) == 1


def test_a_suspended_process_is_not_stalled() -> None:
    world = World()
    world.batch(1, 0.001)
    world.watchdog.check()
    world.now += 30.0
    world.watchdog.check()
    world.look_for(PATIENCE_S - 0.15)
    assert world.changes == []
    world.look_for(0.3)
    assert len(world.changes) == 1


def test_the_watchdog_thread_checks_and_ends() -> None:
    liveness = Liveness(time.monotonic())
    stalled = threading.Event()
    watchdog = Watchdog(liveness, stalled.set)
    liveness.ended(1, 0.001)
    watchdog.start()
    try:
        assert stalled.wait(30)
    finally:
        watchdog.close()
    watchdog.close()
    assert watchdog.stalled_s >= PATIENCE_S


def test_the_loop_notes_its_batches(bench) -> None:
    stalled: list[bool] = []

    def check() -> None:
        still_s, patience_s = bench.loop.liveness.still(bench.now + 2.0, 0.0)
        stalled.append(still_s >= patience_s)

    bench.kernel.on_call = check
    grant = bench.grant("a")
    for _ in range(3):
        slot = bench.write(grant, 3)
        bench.step()
        bench.take(grant, slot)
    # No cost is known for the first; the others would be overdue.
    assert stalled == [False, True, True]


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
