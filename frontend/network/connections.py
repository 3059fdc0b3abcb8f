"""Accepts the HTTP endpoint's connections, at most as many as there are file descriptors.

asyncio's own server accepts all pending connections before it serves one. If descriptors run out, it logs a
traceback for each connection that it cannot accept, thousands a second.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import logging
import socket
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable

from eaas.generation.errors import ApiError

__all__ = ["Connection", "Connections", "State"]

_LOG = logging.getLogger(__name__)
_LOG_EVERY_S = 60.0
# A request has this long to arrive before its connection may be evicted, because in a burst whole requests
# wait in the kernel's buffers.
_GRACE_S = 0.5
# Connections accepted at a time, and refused ones that are still open. In between, evicted connections free
# their descriptors.
_AT_A_TIME = 16
_PAUSE_S = 0.05
# If all connections are busy, new ones wait this long and are then refused.
_PATIENCE_S = 1.0
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class State(enum.Enum):
    """What a connection does."""

    BUSY = "its request is complete and is being answered, or it is being opened"
    READING = "it waits for its first request, or for the rest of one"
    IDLE = "its last answer is complete"
    REFUSED = "its last answer is a refusal, which its client may still read"


class Connection(asyncio.Protocol):
    """A connection that can be closed for another one. It tells `Connections.enter` its state.

    Attributes:
        refusal: The only answer that its client gets, if there was no room for it.
    """

    refusal: ApiError | None = None

    @abstractmethod
    def evict(self) -> None:
        """Close the connection now, to make room for another one."""


class Connections:
    """The open HTTP connections, at most `most`. A further one replaces another, or is refused.

    Idle connections are evicted first, then those with an incomplete request, the oldest first. A busy one
    is never evicted. Refused ones do not count.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        # Of each state, in the order in which they entered it, and when: monotonic seconds.
        self._open = {state: dict[Connection, float]() for state in State}
        self._closed = Counter[State]()
        self._next_log_s = 0.0
        self._refuses_at_s: float | None = None  # if all remain busy

    async def accept(self, listener: socket.socket, new: Callable[[], Connection]) -> None:
        """Accept connections until cancelled; then close the listening socket and those being opened."""
        loop, opening = asyncio.get_running_loop(), set[asyncio.Task[None]]()
        listener.setblocking(False)
        try:
            while True:
                # Without a descriptor, `accept` fails even if no client waits.
                await _readable(listener)
                try:
                    while len(opening) < _AT_A_TIME:
                        accepted, _ = listener.accept()
                        accepted.setblocking(False)
                        task = loop.create_task(self._serve(accepted, new()))
                        opening.add(task)
                        task.add_done_callback(opening.discard)
                    await asyncio.wait(opening, return_when=asyncio.FIRST_COMPLETED)
                except OSError as error:
                    if error.errno in _SHORTAGES:
                        # Other parts of the process used the last descriptors.
                        self.evict_one()
                        await asyncio.sleep(_PAUSE_S)
        finally:
            for task in opening:
                task.cancel()
            listener.close()

    async def _serve(self, accepted: socket.socket, connection: Connection) -> None:
        """Serve a connection once there is room, or refuse it."""
        try:
            if await self._wait_room():
                self.enter(connection, State.BUSY)
            else:
                self._closed[State.REFUSED] += 1
                message = "Too many connections are open. Try again later."
                connection.refusal = ApiError(429, message, code="overloaded")
            loop = asyncio.get_running_loop()
            await loop.connect_accepted_socket(lambda: connection, accepted)
        except (OSError, asyncio.CancelledError):
            # The client has left, or the server stops.
            self.leave(connection)
            accepted.close()

    async def _wait_room(self) -> bool:
        while not self.make_room():
            self._refuses_at_s = self._refuses_at_s or time.monotonic() + _PATIENCE_S
            if time.monotonic() >= self._refuses_at_s:
                return False
            await asyncio.sleep(_PAUSE_S)
        self._refuses_at_s = None
        return True

    def make_room(self) -> bool:
        """Evict a connection if the limit is reached. False: all are busy."""
        counted = (len(each) for state, each in self._open.items() if state is not State.REFUSED)
        return sum(counted) < self.most or self.evict_one()

    def evict_one(self) -> bool:
        """Close the connection that is first to evict, to free its descriptor. False: there is none."""
        for state, grace_s in ((State.IDLE, 0.0), (State.READING, _GRACE_S)):
            oldest, since_s = next(iter(self._open[state].items()), (None, 0.0))
            if oldest is not None and time.monotonic() >= since_s + grace_s:
                self._closed[state] += 1
                self.leave(oldest)
                oldest.evict()
                return True
        return False

    def enter(self, connection: Connection, state: State) -> None:
        """Note a connection's new state. One that stays in its state does not become younger."""
        if connection not in self._open[state]:
            self.leave(connection)
            self._open[state][connection] = time.monotonic()
        if len(refused := self._open[State.REFUSED]) > _AT_A_TIME:
            oldest = next(iter(refused))
            self.leave(oldest)
            oldest.evict()

    def leave(self, connection: Connection) -> None:
        """Stop counting a connection that is closed or being closed, which makes room for another one."""
        for each in self._open.values():
            each.pop(connection, None)

    def log(self) -> None:
        """Log evicted and refused HTTP connections, at most one line a minute; called often."""
        if not self._closed or time.monotonic() < self._next_log_s:
            return
        _LOG.warning(
            "more than %d connections at once: closed %d idle ones and %d with an incomplete request, "
            "refused %d new ones; raise the limit of open files (ulimit -n) to allow more",
            self.most,
            *(self._closed[state] for state in (State.IDLE, State.READING, State.REFUSED)),
        )
        self._closed.clear()
        self._next_log_s = time.monotonic() + _LOG_EVERY_S


async def _readable(listener: socket.socket) -> None:
    loop, readable = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(listener, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(listener)
