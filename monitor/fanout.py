"""What all watchers are sent, made once, and their waking.

A watcher is a coroutine that sleeps here. It is woken when something happened, or after a silence that its
member would take for the monitor's end. What it sends are bytes that all watchers share: a message that
is serialized for each of ten thousand would cost more than all that it says is worth.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from typing import Any

import grpc

from eaas.rpc.v1 import common_pb2
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.types import Member, MemberState
from monitor.life import MemberEvent
from monitor.refusal import Refused

__all__ = ["Fanout", "message_of"]


# Messages: who is further behind than most has his made anew.
_KEPT = 256
# Snapshots that are sent at a time: gRPC copies each, and one of ten thousand members has megabytes.
_SNAPSHOTS = 16
# Of one, to a watcher that reads.
_SNAPSHOT_S = 10.0
# Seconds by which a sign of life may come late, so that many come due together.
_REMIND_S = 0.05


class Fanout:
    """Sleepers, and the messages of the last events. Used in the loop's thread, but for `stir`.

    Args:
        loop: Runs the watchers.
        sign_s: Longest sleep.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, sign_s: float) -> None:
        self._loop = loop
        self._sign_s = sign_s
        # In the order in which they fell asleep, with the end of the longest sleep.
        self._sleepers: OrderedDict[asyncio.Future[bool], float] = OrderedDict()
        # Those that nothing but an event wakes.
        self._sound: set[asyncio.Future[bool]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._stirred = False
        self._made: OrderedDict[tuple[int, bool], bytes] = OrderedDict()
        self._snapshots = asyncio.Semaphore(_SNAPSHOTS)

    def stir(self) -> None:
        """Something happened; any thread may say so. Everybody wakes, soon after."""
        if not self._stirred:
            self._stirred = True
            self._loop.call_soon_threadsafe(self._wake)

    async def sleep(self, *, soundly: bool = False) -> bool:
        """Until something happened (True), or for as long as a watcher may be silent (False).

        Args:
            soundly: It may be silent for ever.
        """
        sleeper: asyncio.Future[bool] = self._loop.create_future()
        if soundly:
            self._sound.add(sleeper)
        else:
            self._sleepers[sleeper] = self._loop.time() + self._sign_s
            if self._timer is None:
                self._timer = self._loop.call_later(self._sign_s, self._remind)
        try:
            return await sleeper
        finally:
            self._sleepers.pop(sleeper, None)
            self._sound.discard(sleeper)

    def _wake(self) -> None:
        # First: what happens from now on may not be seen by those that wake.
        self._stirred = False
        sleepers = (*self._sleepers, *self._sound)
        self._sleepers.clear()
        self._sound.clear()
        for sleeper in sleepers:
            if not sleeper.done():
                sleeper.set_result(True)

    def _remind(self) -> None:
        now = self._loop.time()
        self._timer = None
        while self._sleepers:
            sleeper, until = self._sleepers.popitem(last=False)
            if until > now:
                self._sleepers[sleeper] = until
                self._sleepers.move_to_end(sleeper, last=False)
                self._timer = self._loop.call_at(max(until, now + _REMIND_S), self._remind)
                return
            if not sleeper.done():
                sleeper.set_result(False)

    def message(self, event: MemberEvent, knows_left: bool = True) -> bytes:
        """An event as watchers are sent it; `knows_left`: see `WatchRequest`."""
        key = event.revision, knows_left
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = pb.WatchResponse(
                event=pb.MemberEvent(
                    revision=event.revision,
                    member=message_of(event.member, knows_left),
                    reason=event.reason,
                    forgotten=event.forgotten,
                )
            ).SerializeToString()
            if len(self._made) > _KEPT:
                self._made.popitem(last=False)
        return made

    async def send_snapshot(self, message: bytes, context: Any) -> None:
        """Sends a watcher a snapshot, once it is its turn.

        Raises:
            Refused: It does not read, and others wait for theirs.
        """
        async with self._snapshots:
            try:
                # Not `wait_for`, which loses a cancellation that comes as the message goes out.
                async with asyncio.timeout(_SNAPSHOT_S):
                    await context.write(message)
            except TimeoutError as error:
                why = f"the snapshot was not read within {_SNAPSHOT_S:g} s"
                raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, why) from error


def message_of(member: Member, knows_left: bool) -> common_pb2.Member:
    """A member as its watcher can read it: LEFT is DEAD for watchers of earlier releases."""
    message = member.to_proto()
    if member.state is MemberState.LEFT and not knows_left:
        message.state = common_pb2.MEMBER_STATE_DEAD
    return message
