"""Broadcast of the monitor's membership events: wakes watchers' streams, serializes each message once.

A watcher is the coroutine that serves a member's Watch stream. It sleeps here until an event, or for the
longest silence that its member tolerates. All watchers share the same message bytes, because serializing an
event for each of ten thousand would cost too much.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from typing import Any

import grpc

from eaas.rpc.v1 import monitor_pb2 as pb
from monitor.incarnation import MemberEvent
from monitor.refusal import Refused
from monitor.snapshots import Knows, message_of

__all__ = ["Fanout"]

# Limit of cached messages. A watcher further behind gets them serialized anew.
_KEPT = 256
# Watchers that wake in one turn of the loop. Each then writes a message, which takes some 40 us.
_WOKEN = 128
# Extra delay of a sign of life, so that many are sent in one wake-up.
_WAKE_DELAY_S = 0.05


class Fanout:
    """Wakes sleeping watchers, and caches the messages of the last events. Only `notify` is thread-safe.

    Args:
        loop: Runs the watchers.
        sign_s: Longest sleep.
        snapshots: Limit of concurrent snapshot sends, because gRPC copies each and a large one has megabytes.
        snapshot_s: Timeout of one send.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sign_s: float,
        snapshots: int = 16,
        snapshot_s: float = 10.0,
    ) -> None:
        self._loop = loop
        self._sign_s = sign_s
        # Sleepers in the order in which they fell asleep, with the time at which each must wake.
        self._sleepers: OrderedDict[asyncio.Future[bool], float] = OrderedDict()
        # Sleepers that wake only on an event.
        self._event_only: set[asyncio.Future[bool]] = set()
        self._to_wake: deque[asyncio.Future[bool]] = deque()
        self._waking = False
        self._timer: asyncio.TimerHandle | None = None
        self._notified = False
        self._made: OrderedDict[tuple[int, Knows], bytes] = OrderedDict()
        self._snapshots = asyncio.Semaphore(snapshots)
        self._snapshot_s = snapshot_s
        self._starting = asyncio.Lock()

    def notify(self) -> None:
        """Wake all watchers soon, because there is a new event. Safe from any thread."""
        if not self._notified:
            self._notified = True
            self._loop.call_soon_threadsafe(self._wake)

    async def sleep(self, *, until_event: bool = False) -> bool:
        """Let the calling watcher sleep until an event (True), or for the longest silence (False).

        Args:
            until_event: Sleep until an event, however long.
        """
        sleeper: asyncio.Future[bool] = self._loop.create_future()
        if until_event:
            self._event_only.add(sleeper)
        else:
            self._sleepers[sleeper] = self._loop.time() + self._sign_s
            if self._timer is None:
                self._timer = self._loop.call_later(self._sign_s, self._wake_overdue)
        try:
            return await sleeper
        finally:
            self._sleepers.pop(sleeper, None)
            self._event_only.discard(sleeper)

    def _wake(self) -> None:
        # Cleared first, because the watchers woken now may miss later events.
        self._notified = False
        self._to_wake.extend(self._sleepers)
        self._to_wake.extend(self._event_only)
        self._sleepers.clear()
        self._event_only.clear()
        if not self._waking:
            self._wake_some()

    def _wake_some(self) -> None:
        """Wake some of `_to_wake` in each turn of the loop, so that heartbeats do not wait for all."""
        for _ in range(min(_WOKEN, len(self._to_wake))):
            sleeper = self._to_wake.popleft()
            if not sleeper.done():
                sleeper.set_result(True)
        self._waking = bool(self._to_wake)
        if self._waking:
            self._loop.call_soon(self._wake_some)

    def _wake_overdue(self) -> None:
        now = self._loop.time()
        self._timer = None
        while self._sleepers:
            sleeper, until = self._sleepers.popitem(last=False)
            if until > now:
                self._sleepers[sleeper] = until
                self._sleepers.move_to_end(sleeper, last=False)
                self._timer = self._loop.call_at(
                    max(until, now + _WAKE_DELAY_S), self._wake_overdue
                )
                return
            if not sleeper.done():
                sleeper.set_result(False)

    def message(self, event: MemberEvent, knows: Knows) -> bytes:
        """Return the serialized message of an event, for watchers that understand this much."""
        key = event.revision, knows
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = pb.WatchResponse(
                event=pb.MemberEvent(
                    revision=event.revision,
                    member=message_of(event.member, knows),
                    reason=event.reason,
                    # Without an event, the watcher's revision would fall behind.
                    forgotten=event.forgotten or not knows.lists(event.member),
                )
            ).SerializeToString()
            if len(self._made) > _KEPT:
                self._made.popitem(last=False)
        return made

    async def send_snapshot(self, message: bytes, context: Any) -> None:
        """Send a snapshot of the members to a watcher, within the limit on concurrent sends.

        Raises:
            Refused: The watcher does not read it in time.
        """
        async with self._snapshots:
            try:
                # `wait_for` would lose a cancellation that arrives while the message is sent.
                async with asyncio.timeout(self._snapshot_s):
                    # gRPC copies the message at once, so that only one send starts in a turn of the loop.
                    async with self._starting:
                        await asyncio.sleep(0)
                    await context.write(message)
            except TimeoutError as error:
                why = f"the snapshot was not read within {self._snapshot_s:g} s"
                raise Refused(grpc.StatusCode.RESOURCE_EXHAUSTED, why) from error
