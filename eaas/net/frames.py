"""Messages over TCP connections, in asyncio: each message after its length (4 bytes, little-endian).

With TLS both sides show certificates, whose roles decide as those of gRPC's callers do. A third of gRPC's
processor time for a small message (docs/adr/0051-engines-on-framed-connections.md).
"""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable

from eaas.log import get_logger
from eaas.net.authorisation import role_among
from eaas.net.tls import Identity, server_name

__all__ = ["FrameConnection", "accept", "connect"]

_log = get_logger(__name__)
_LENGTH = struct.Struct("<I")
_HANDSHAKE_S = 10.0
# Bytes that wait to be sent, above which the other side counts as one that does not read.
_MOST_UNSENT = 1 << 20
_ACCEPT_AGAIN_S = 0.1


class FrameConnection(asyncio.Protocol):
    """One side of a connection. All its methods, and what it calls, run on the event loop.

    Args:
        most_bytes: Longest message; a longer one ends the connection.
        on_open: Called when it is established.
        on_frame: Called with each message.
        on_end: Called once when an established connection has ended, with the reason.

    Attributes:
        heard_at: The loop's time when something was last received.
        blocked_at: Since when the other side does not read; None: it reads.
        role: Role in the other side's certificate; None without TLS.
    """

    def __init__(
        self,
        most_bytes: int,
        on_open: Callable[[FrameConnection], None],
        on_frame: Callable[[bytes], None],
        on_end: Callable[[str], None],
    ) -> None:
        self._most_bytes = most_bytes
        self._on_open, self._on_frame, self._on_end = on_open, on_frame, on_end
        self._received = bytearray()
        self._transport: asyncio.Transport
        self._reason = ""
        self.heard_at = 0.0
        self.blocked_at: float | None = None
        self.role: str | None = None

    def send(self, data: bytes) -> None:
        """Send a message; no effect on a connection that has ended."""
        if not self._transport.is_closing():
            # One call, since each may be a system call.
            self._transport.write(_LENGTH.pack(len(data)) + data)

    def close(self, reason: str) -> None:
        """End the connection once what was sent is on its way. Idempotent."""
        self._reason = self._reason or reason
        self._transport.close()

    def abort(self, reason: str) -> None:
        """End the connection at once."""
        self._reason = self._reason or reason
        self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin (asyncio's call)."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(_MOST_UNSENT)
        # Else a small message waits for the acknowledgement of the one before.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.heard_at = asyncio.get_running_loop().time()
        shown = transport.get_extra_info("peercert")
        if shown is not None:
            names = shown.get("subjectAltName", ())
            self.role = role_among(name for kind, name in names if kind == "URI")
        self._on_open(self)

    def data_received(self, data: bytes) -> None:
        """Take bytes of the other side (asyncio's call)."""
        self.heard_at = asyncio.get_running_loop().time()
        received = self._received
        received += data
        begin = 0
        while len(received) - begin >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(received, begin)
            if length > self._most_bytes:
                self.abort(f"a message of {length} bytes; the limit is {self._most_bytes}")
                return
            end = begin + _LENGTH.size + length
            if len(received) < end:
                break
            self._on_frame(bytes(received[begin + _LENGTH.size : end]))
            if self._transport.is_closing():
                return
            begin = end
        del received[:begin]

    def pause_writing(self) -> None:
        """Note that the other side does not read (asyncio's call)."""
        self.blocked_at = asyncio.get_running_loop().time()

    def resume_writing(self) -> None:
        """Note that it reads again (asyncio's call)."""
        self.blocked_at = None

    def connection_lost(self, error: Exception | None) -> None:
        """End (asyncio's call)."""
        self._on_end(self._reason or (str(error) if error else "the other side closed it"))


async def accept(
    listener: socket.socket,
    make: Callable[[], FrameConnection],
    tls: Identity | None,
) -> None:
    """Accept connections until cancelled. Each new one uses the newest certificates.

    Args:
        listener: A listening socket.
        make: Makes the protocol of a connection.
        tls: Identity of this process; None: plain text.
    """
    loop = asyncio.get_running_loop()
    listener.setblocking(False)
    opening = set[asyncio.Task[None]]()
    while True:
        try:
            connected, _ = await loop.sock_accept(listener)
        except OSError as error:  # too many open files
            _log.warning("cannot accept a connection: %s", error)
            await asyncio.sleep(_ACCEPT_AGAIN_S)
            continue
        task = loop.create_task(_open(connected, make, tls))
        opening.add(task)
        task.add_done_callback(opening.discard)


async def _open(
    connected: socket.socket, make: Callable[[], FrameConnection], tls: Identity | None
) -> None:
    try:
        await asyncio.get_running_loop().connect_accepted_socket(
            make,
            connected,
            ssl=None if tls is None else tls.server_context(),
            ssl_handshake_timeout=None if tls is None else _HANDSHAKE_S,
        )
    except OSError as error:  # also ssl.SSLError and a handshake that takes too long
        _log.warning("a connection was refused: %s", str(error) or type(error).__name__)
        connected.close()


async def connect(
    address: str,
    make: Callable[[], FrameConnection],
    peer: str,
    tls: Identity | None,
    timeout_s: float,
) -> None:
    """Connect to a process.

    Args:
        address: host:port.
        make: Makes the protocol of the connection.
        peer: Role that the process's certificate must have.
        tls: Identity of this process; None: plain text.
        timeout_s: Longest time, with the handshake.

    Raises:
        OSError: It cannot be reached, or its certificate is not valid.
        TimeoutError: It does not answer in time.
    """
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(timeout_s):
        await asyncio.get_running_loop().create_connection(
            make,
            host.strip("[]"),
            int(port),
            ssl=tls.client_context() if tls is not None else None,
            server_hostname=server_name(peer) if tls is not None else None,
        )
