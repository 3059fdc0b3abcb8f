"""The choice of the next monitor after a failure."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from eaas.errors import ClusterError
from eaas.membership.monitors import LEADER_KEY, MonitorConnection, Monitors, ask_members
from eaas.net.grpc_failure import CallFailure
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.types import Member, MemberState, Role


def refusal(code: grpc.StatusCode, leader: str | None = None) -> CallFailure:
    """A failed call; `leader` is in its metadata."""
    return CallFailure(code, "not now", () if leader is None else ((LEADER_KEY, leader),))


UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def three() -> Iterator[Monitors]:
    monitors = Monitors("a:1, b:2,c:3")
    yield monitors
    monitors.close()


SILENT, NOT_LEADING = TimeoutError(), refusal(UNAVAILABLE)


@pytest.mark.parametrize(
    ("monitors", "errors", "asked"),
    [
        ("a:1", [NOT_LEADING, refusal(UNAVAILABLE, "b:2")], "aaa"),
        ("a:1, b:2,c:3", [SILENT] * 3, "abca"),
        ("a:1,b:2,c:3", [refusal(UNAVAILABLE, "c:3")], "ac"),
        ("a:1,b:2,c:3", [refusal(UNAVAILABLE, "evil:1")], "ab"),
        # a is dead; b and c do not know yet.
        ("a:1,b:2,c:3", [NOT_LEADING, refusal(UNAVAILABLE, "a:1")], "abc"),
        # The leader's own answers.
        *(
            ("a:1,b:2,c:3", [refusal(code)], "aa")
            for code in (
                grpc.StatusCode.NOT_FOUND,
                grpc.StatusCode.ALREADY_EXISTS,
                grpc.StatusCode.INVALID_ARGUMENT,
                grpc.StatusCode.FAILED_PRECONDITION,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
            )
        ),
    ],
)
def test_the_next_monitor(monitors: str, errors: list[Exception], asked: str) -> None:
    known = Monitors(monitors)
    found = known.now.address[0]
    for error in errors:
        before = known.now
        assert known.leave(before, error) == (known.now is not before)
        found += known.now.address[0]
    known.close()
    assert found == asked


def test_two_threads_switch_only_once(three: Monitors) -> None:
    monitor = three.now
    assert three.leave(monitor, refusal(UNAVAILABLE))
    assert not three.leave(monitor, refusal(UNAVAILABLE))
    assert three.now.address == "b:2"


@pytest.mark.parametrize("seed", range(200))
def test_the_leader_is_found_from_any_state(seed: int) -> None:
    dice = random.Random(seed)
    names = [f"m:{i}" for i in range(dice.randint(1, 5))]
    monitors = Monitors(",".join(names))
    for _ in range(4):
        leader, dead = dice.choice(names), dice.choice([*names, None])
        hints = {name: dice.choice([*names, None]) for name in names}
        asked = 0
        while (now := monitors.now).address != leader or leader == dead:
            hint = None if now.address == dead else hints[now.address]
            monitors.leave(now, refusal(UNAVAILABLE, hint))
            asked += 1
            if asked == 2 * len(names):
                # By then everybody knows.
                leader = leader if leader != dead else dice.choice(names)
                hints = dict.fromkeys(names, leader)
                dead = None
            assert asked < 5 * len(names), (leader, dead, hints)
    monitors.close()


# -- members --------------------------------------------------------------------------------------

ALL = [
    Member("s1", Role.EXPERT_SERVER, 1, "h", "a:1", MemberState.SERVING, incarnation=1),
    Member("s2", Role.EXPERT_SERVER, 2, "h", "a:2", MemberState.DEAD, incarnation=4),
]
SNAPSHOT = pb.WatchResponse(snapshot=pb.Snapshot(members=[m.to_proto() for m in ALL]))
STOPPING = pb.WatchResponse(stopping=True)


class Answers:
    """Answers of a stub's Watch, one per call; the last one repeats."""

    def __init__(
        self, monitor: MonitorConnection, *answers: CallFailure | list[pb.WatchResponse]
    ) -> None:
        self.answers = list(answers)
        self.timeouts: list[float] = []
        monitor.stub = self

    def Watch(self, _request: Any, timeout: float) -> Any:
        self.timeouts.append(timeout)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return Stream(answer)


class Stream:
    def __init__(self, answer: CallFailure | list[pb.WatchResponse]) -> None:
        self._answer = answer

    def __iter__(self) -> Iterator[pb.WatchResponse]:
        if isinstance(self._answer, CallFailure):
            raise self._answer
        yield from self._answer

    def cancel(self) -> None:
        """Do nothing."""


def test_the_leader_answers_at_any_position_in_the_list(three: Monitors) -> None:
    a, b, c = (Answers(monitor, refusal(UNAVAILABLE, "c:3")) for monitor in three._connections)
    c.answers = [[SNAPSHOT]]
    assert ask_members(three, 60.0) == ALL
    assert [len(asked.timeouts) for asked in (a, b, c)] == [1, 0, 1]
    # A silent monitor must leave time for the others.
    assert a.timeouts[0] <= 20.0


def test_a_takeover_is_waited_for() -> None:
    monitors = Monitors("a:1")
    nobody_leads = refusal(UNAVAILABLE)
    Answers(monitors.now, nobody_leads, [], [STOPPING], nobody_leads, [SNAPSHOT])
    assert ask_members(monitors, 60.0) == ALL
    monitors.close()


@pytest.mark.parametrize("answer", [refusal(UNAVAILABLE), []])
def test_no_answer_in_time(answer: CallFailure | list[pb.WatchResponse]) -> None:
    monitors = Monitors("a:1")
    asked = Answers(monitors.now, answer)
    began = time.monotonic()
    with pytest.raises(ClusterError, match=r"the monitor at a:1 .*; check the address"):
        ask_members(monitors, 0.5)
    assert time.monotonic() - began < 10.0
    assert len(asked.timeouts) > 1
    monitors.close()
