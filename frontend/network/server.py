"""The frontend's HTTP server: uvicorn, in its own thread, on a socket that is already bound."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import threading
import time
from functools import partial

import uvicorn
from starlette.applications import Starlette

from eaas.errors import ClusterError
from eaas.log import get_logger
from eaas.net.grpc_server import join_host_port
from eaas.open_files import room_for_connections
from frontend.limits import ServeLimits
from frontend.network.connections import Connections
from frontend.network.http_connection import HttpConnection

__all__ = ["HttpServer"]

_log = get_logger(__name__)
_START_TIMEOUT_S = 60.0
_POLL_S = 0.2
_TICK_S = 1.0
# Longer than clients keep an idle connection, 5 s (httpx) to 60 s (nginx). If both sides closed at the same
# time, a client could send a request into a closed connection.
_KEEP_ALIVE_S = 75
_CLOSE_PAGES_S = 5.0
# At the end a kept connection is closed only after this long without a request, since its client may just be
# sending one. Each answer from then on says that it is the connection's last.
_QUIET_S = 1.0
_AFTER_GRACE_S = 10.0  # failed requests and the engine need less time to end


class HttpServer(uvicorn.Server):  # type: ignore[misc]
    """Serves the HTTP application in a background thread, by uvicorn.

    At the end of the grace period it stops the engine instead of cancelling requests. The client of an
    aborted request then reads an error, not half an answer.

    Args:
        app: The application, from `build_app`.
        listener: A socket from `bind`.
        limits: Limits of connections and of request headers.

    Attributes:
        address: host:port, with the actual port.
    """

    def __init__(self, app: Starlette, listener: socket.socket, limits: ServeLimits) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                log_config=None,
                access_log=False,
                server_header=False,
                ws="none",
                # Fixed, so that installed packages do not change the loop and the parser that tests cover.
                loop="asyncio",
                http=HttpConnection,
                lifespan="on",
                timeout_keep_alive=_KEEP_ALIVE_S,
            )
        )
        self.address = join_host_port(*listener.getsockname()[:2])
        self._listener = listener
        self._limits = limits
        self._grace_s = 0.0
        self._thread: threading.Thread | None = None

    _connections: Connections
    _accepting: asyncio.Task[None]
    _loop: asyncio.AbstractEventLoop
    _exit: asyncio.Event

    def start(self) -> None:
        """Start the thread, and return when the server answers. Raises ClusterError."""
        self._thread = threading.Thread(target=self.run, name="http", daemon=True)
        self._thread.start()
        deadline = time.monotonic() + _START_TIMEOUT_S
        while time.monotonic() < deadline and self._thread.is_alive():
            if self.started:
                return
            time.sleep(0.02)
        raise ClusterError(f"the HTTP server on {self.address} did not start")

    def stop(self, grace_s: float, at_once: threading.Event | None = None) -> None:
        """Stop accepting connections, give running requests `grace_s` to end, then fail them.

        Args:
            grace_s: Longest wait for running requests.
            at_once: Ends the wait early.

        Raises:
            ClusterError: The server's thread does not end.
        """
        if self._thread is None or not self._thread.is_alive():
            return
        self._grace_s = grace_s
        self.should_exit = True
        if self.started and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._exit.set)
        deadline = time.monotonic() + grace_s + 2 * _AFTER_GRACE_S
        while self._thread.is_alive() and time.monotonic() < deadline:
            self._thread.join(_POLL_S)
            if at_once is not None and at_once.is_set():
                self.config.app.state.end_requests()
                self._thread.join(2 * _AFTER_GRACE_S)
                break
        if self._thread.is_alive():
            raise ClusterError(f"the HTTP server on {self.address} did not stop")
        self._thread = None

    # -- uvicorn's steps, in the server's own thread ------------------------------------------------------

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the application with its engine, then accept HTTP connections."""
        self._loop, self._exit = asyncio.get_running_loop(), asyncio.Event()
        await super().startup(sockets=[])
        # Accepted connections inherit it. The kernel counts bytes that no client acknowledges or takes.
        timeout_ms = int(1000 * self._limits.send_timeout_s)
        self._listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout_ms)
        self._connections = Connections(min(self._limits.max_connections, room_for_connections()))
        connection = partial(
            HttpConnection,
            self._limits,
            self._connections,
            config=self.config,
            server_state=self.server_state,
            app_state=self.lifespan.state,
        )
        accepting = self._connections.accept(self._listener, connection)
        self._accepting = asyncio.create_task(accepting)

    async def main_loop(self) -> None:
        """Update the Date header and log evicted connections once a second, until the server stops.

        uvicorn's own loop wakes ten times a second, a quarter of what an idle frontend costs.
        """
        while not await self.on_tick(0):
            self._connections.log()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._exit.wait(), _TICK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop accepting, close the dashboard, and let requests end in the grace period; then fail them.

        A client may send its next request on a connection as soon as it has an answer. If the connection
        closed at that moment, the request would fail.
        """
        self._accepting.cancel()
        await asyncio.wait((self._accepting,))
        # In place, because requests whose answers have not begun share this list.
        self.server_state.default_headers.append((b"connection", b"close"))
        loop = asyncio.get_running_loop()
        close_pages = self.config.app.state.close_pages
        if close_pages is not None:
            try:
                async with asyncio.timeout(_CLOSE_PAGES_S):
                    await close_pages()
            except Exception:  # noqa: BLE001 (logged; requests must still end)
                _log.exception("the dashboard did not close")
        self.config.timeout_graceful_shutdown = math.ceil(self._grace_s + _AFTER_GRACE_S)
        timer = loop.call_later(
            self._grace_s, loop.run_in_executor, None, self.config.app.state.end_requests
        )
        await self._wait_quiet(loop.time() + self._grace_s)
        await super().shutdown(sockets)
        timer.cancel()

    async def _wait_quiet(self, deadline: float) -> None:
        """Wait until no connection has had a request for a moment, at most until `deadline` (loop's time)."""
        loop = asyncio.get_running_loop()
        busy_at = loop.time()
        while self.server_state.connections and loop.time() < deadline:
            if self.server_state.tasks:
                busy_at = loop.time()
            elif loop.time() - busy_at >= min(_QUIET_S, self._grace_s / 4):
                return
            await asyncio.sleep(_POLL_S / 10)
