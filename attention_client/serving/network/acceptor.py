"""Accepts the HTTP endpoint's connections, at most as many as there are file descriptors.

asyncio's own server accepts all pending connections before it serves one. If descriptors run out, it logs a
traceback for each connection that it cannot accept, thousands a second.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Callable

from attention_client.serving.errors import ApiError
from attention_client.serving.network.connections import Connections
from attention_client.serving.network.http_connection import HttpConnection, plain_answer

__all__ = ["Acceptor"]

# Connections accepted at a time. In between, evicted connections free their descriptors.
_AT_A_TIME = 16
_PAUSE_S = 0.05
# If all connections are busy, new ones wait this long in the kernel's queue and are then refused.
_PATIENCE_S = 1.0
_SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
# A refused connection stays open for this long. Closed at once, with its request unread, it would lose
# the refusal.
_LINGER_S = 1.0
_REFUSED = plain_answer(
    ApiError(429, "Too many connections are open. Try again later.", code="overloaded")
)


class Acceptor:
    """Accepts connections from the endpoint's listening socket, in the running event loop."""

    def __init__(
        self, listener: socket.socket, new: Callable[[], HttpConnection], connections: Connections
    ) -> None:
        self._listener = listener
        self._new = new
        self._connections = connections
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._refused: deque[socket.socket] = deque()
        self._pause: asyncio.TimerHandle | None = None
        self._busy_since: float | None = None
        listener.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Close the listening socket when the server stops. Connections that are served stay open."""
        if self._pause is not None:
            self._pause.cancel()
        else:
            self._loop.remove_reader(self._listener)
        self._listener.close()
        while self._refused:
            self._refused.popleft().close()

    def _resume(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_A_TIME):
            if self._connections.all_busy:
                self._busy_since = self._busy_since or self._loop.time()
                if self._loop.time() < self._busy_since + _PATIENCE_S:
                    self._wait()
                    return
            else:
                self._busy_since = None
            try:
                accepted, _ = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in _SHORTAGES:
                    raise
                # Other parts of the process used the last descriptors.
                self._connections.evict_one()
                self._wait()
                return
            accepted.setblocking(False)
            if self._connections.make_room():
                self._serve(accepted)
            else:
                self._refuse(accepted)

    def _wait(self) -> None:
        """Pause accepting, because the listener stays readable while connections are pending."""
        self._loop.remove_reader(self._listener)
        self._pause = self._loop.call_later(_PAUSE_S, self._resume)

    def _serve(self, accepted: socket.socket) -> None:
        connection = self._new()
        self._connections.add(connection)

        async def serve() -> None:
            try:
                await self._loop.connect_accepted_socket(lambda: connection, accepted)
            except OSError:
                # The client has left.
                self._connections.remove(connection)
                accepted.close()

        task = self._loop.create_task(serve())
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def _refuse(self, refused: socket.socket) -> None:
        if len(self._refused) == _AT_A_TIME:
            self._refused.popleft().close()
        try:
            refused.send(_REFUSED)
            refused.shutdown(socket.SHUT_WR)
        except OSError:
            # The client has left.
            refused.close()
            return
        self._refused.append(refused)
        self._loop.call_later(_LINGER_S, self._close_refused, refused)

    def _close_refused(self, refused: socket.socket) -> None:
        if refused in self._refused:
            self._refused.remove(refused)
            refused.close()
