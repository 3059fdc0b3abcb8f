"""Watchers sleep together, wake together, and share their messages."""

from __future__ import annotations

import asyncio

from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.types import Member, MemberState, Role
from monitor.fanout import Fanout
from monitor.incarnation import MemberEvent
from monitor.refusal import Refused
from monitor.snapshots import Knows

SIGN_S = 0.05
LONG_S = 30.0


def event(revision: int) -> MemberEvent:
    member = Member("m", Role.BALANCER, 1, "h", "", MemberState.SERVING, incarnation=revision)
    return MemberEvent(revision, member, "because")


def test_all_wake_when_another_thread_notifies() -> None:
    async def scenario() -> list[bool]:
        fanout = Fanout(asyncio.get_running_loop(), LONG_S)
        sleepers = [asyncio.create_task(fanout.sleep(until_event=n % 2 == 0)) for n in range(50)]
        await asyncio.sleep(0)
        await asyncio.to_thread(fanout.notify)
        async with asyncio.timeout(LONG_S / 2):
            return await asyncio.gather(*sleepers)

    assert asyncio.run(scenario()) == [True] * 50


def test_event_only_sleepers_are_not_woken_by_time() -> None:
    async def scenario() -> tuple[list[bool], bool]:
        fanout = Fanout(asyncio.get_running_loop(), SIGN_S)
        sound = asyncio.create_task(fanout.sleep(until_event=True))
        light = [asyncio.create_task(fanout.sleep()) for _ in range(20)]
        later = []
        for _ in range(3):
            await asyncio.sleep(SIGN_S / 3)
            later.append(asyncio.create_task(fanout.sleep()))
        async with asyncio.timeout(LONG_S):
            reminded = await asyncio.gather(*light, *later)
            # No sleeper is left, and the next sleep is timed anew.
            reminded.append(await fanout.sleep())
        slept_on = not sound.done()
        sound.cancel()
        return reminded, slept_on

    assert asyncio.run(scenario()) == ([False] * 24, True)


def test_a_message_is_serialized_once_and_not_kept_for_ever() -> None:
    loop = asyncio.new_event_loop()
    fanout = Fanout(loop, LONG_S)
    made = [fanout.message(event(revision), Knows()) for revision in range(1, 2001)]
    assert fanout.message(event(2000), Knows()) is made[-1]
    again = fanout.message(event(1), Knows())
    assert again == made[0]
    assert again is not made[0]
    read = pb.WatchResponse.FromString(made[6])
    assert (read.event.revision, read.event.reason) == (7, "because")
    assert Member.from_proto(read.event.member) == event(7).member
    loop.close()


class _Reader:
    """A watcher's stream."""

    under_way = most = 0

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.got: list[bytes] = []

    async def write(self, message: bytes) -> None:
        _Reader.under_way += 1
        _Reader.most = max(_Reader.most, _Reader.under_way)
        try:
            await asyncio.sleep(self.seconds)
            self.got.append(message)
        finally:
            _Reader.under_way -= 1


def test_snapshot_sends_are_limited_and_time_out() -> None:
    stopped = [_Reader(LONG_S) for _ in range(3)]
    readers = [_Reader(0.01) for _ in range(20)]

    async def scenario() -> list[BaseException | None]:
        fanout = Fanout(asyncio.get_running_loop(), LONG_S, snapshots=3, snapshot_s=0.5)
        async with asyncio.timeout(LONG_S / 2):
            return await asyncio.gather(
                *(fanout.send_snapshot(b"all", reader) for reader in (*stopped, *readers)),
                return_exceptions=True,
            )

    ends = asyncio.run(scenario())
    assert [type(end) for end in ends] == 3 * [Refused] + 20 * [type(None)]
    assert all(reader.got == [b"all"] for reader in readers)
    assert _Reader.most == 3
