"""Which monitor is asked after which failure."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from eaas.monitors import LEADER_KEY, Monitors


class Refusal(grpc.RpcError, grpc.Call):  # type: ignore[misc]
    """An answer that is none."""

    def __init__(self, code: grpc.StatusCode, leader: str | None = None) -> None:
        self._code, self._leader = code, leader

    def code(self) -> grpc.StatusCode:
        return self._code

    def trailing_metadata(self) -> Any:
        return () if self._leader is None else ((LEADER_KEY, self._leader),)

    def details(self) -> str:
        return ""

    add_callback = cancel = initial_metadata = is_active = time_remaining = lambda *_: None


UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def three() -> Iterator[Monitors]:
    monitors = Monitors("a:1, b:2,c:3")
    yield monitors
    monitors.close()


def test_one_monitor_is_never_left() -> None:
    monitors = Monitors("a:1")
    line = monitors.now
    assert not monitors.leave(line, Refusal(UNAVAILABLE))
    assert not monitors.leave(line, Refusal(UNAVAILABLE, "b:2"))
    assert monitors.now is line
    monitors.close()


def test_the_next_one_and_round_again(three: Monitors) -> None:
    asked = []
    for _ in range(4):
        asked.append(three.now.address)
        assert three.leave(three.now, TimeoutError())
    assert asked == ["a:1", "b:2", "c:3", "a:1"]


def test_the_one_that_is_named(three: Monitors) -> None:
    assert three.leave(three.now, Refusal(UNAVAILABLE, "c:3"))
    assert three.now.address == "c:3"


def test_nobody_goes_where_the_operator_did_not_say(three: Monitors) -> None:
    three.leave(three.now, Refusal(UNAVAILABLE, "evil:1"))
    assert three.now.address == "b:2"


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.ALREADY_EXISTS,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    ],
)
def test_the_leaders_own_answer_is_no_reason_to_leave(
    three: Monitors, code: grpc.StatusCode
) -> None:
    assert not three.leave(three.now, Refusal(code))
    assert three.now.address == "a:1"


def test_the_second_thread_to_notice_does_not_leave_the_next_one(three: Monitors) -> None:
    line = three.now
    assert three.leave(line, Refusal(UNAVAILABLE))
    assert not three.leave(line, Refusal(UNAVAILABLE))
    assert three.now.address == "b:2"


def test_whoever_takes_the_dead_one_for_the_leader_is_not_believed(three: Monitors) -> None:
    three.leave(three.now, Refusal(UNAVAILABLE))  # a is dead; b and c do not know yet.
    asked = [three.now.address]
    for _ in range(3):
        three.leave(three.now, Refusal(UNAVAILABLE, "a:1"))
        asked.append(three.now.address)
    assert asked[:2] == ["b:2", "c:3"]


@pytest.mark.parametrize("seed", range(200))
def test_the_leader_is_found_whatever_was_believed_before(seed: int) -> None:
    dice = random.Random(seed)
    names = [f"m:{i}" for i in range(dice.randint(1, 5))]
    monitors = Monitors(",".join(names))
    for _ in range(4):
        leader, dead = dice.choice(names), dice.choice([*names, None])
        hints = {name: dice.choice([*names, None]) for name in names}
        asked = 0
        while (now := monitors.now).address != leader or leader == dead:
            hint = None if now.address == dead else hints[now.address]
            monitors.leave(now, Refusal(UNAVAILABLE, hint))
            asked += 1
            if asked == 2 * len(names):
                # By then everybody knows.
                leader = leader if leader != dead else dice.choice(names)
                hints = dict.fromkeys(names, leader)
                dead = None
            assert asked < 5 * len(names), (leader, dead, hints)
    monitors.close()
