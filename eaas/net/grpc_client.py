"""gRPC channels between processes; a deadline or a silence limit ends every call.

Unary calls have a default deadline. Streams have none: the sender sends a sign of life at least every
`STREAM_SIGN_S`, and `async_channel.responses` ends a silent stream.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import grpc
from grpc._channel import _SingleThreadedRendezvous

from eaas.net.grpc_secret import proof
from eaas.net.tls import Identity, server_name

__all__ = [
    "MESSAGE_BYTES",
    "STREAM_SIGN_S",
    "STREAM_SILENCE_S",
    "UNARY_TIMEOUT_S",
    "Backoff",
    "channel",
    "channel_options",
    "leave",
]

MESSAGE_BYTES = 64 << 20
"""Limit of one message, in both directions."""

UNARY_TIMEOUT_S = 5.0
"""Default deadline of a unary call."""

STREAM_SIGN_S = 2.0
"""The sender of a long stream sends a sign of life after this silence."""

STREAM_SILENCE_S = 5.0
"""A stream ends after this silence, because two signs of life are missing."""

_OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    # Windows are fixed, so that no pings measure the bandwidth and idle processes stay idle.
    ("grpc.http2.bdp_probe", 0),
    # By default gRPC clients send no keepalives, so that a stream to a lost peer would last as long as
    # TCP retries.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # Ignore http_proxy in the environment.
    ("grpc.enable_http_proxy", 0),
    # Shared connections share their backoff, even with channels to an earlier process at the same port.
    ("grpc.use_local_subchannel_pool", 1),
    # By default a channel waits up to two minutes before it tries a returned peer again.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Despite its name, this is the timeout of one attempt to connect.
    ("grpc.min_reconnect_backoff_ms", 2_000),
)
# Response streams then wait in C instead of waking Python ten times a second.
_BLOCKING_OPTIONS = (("SingleThreadedUnaryStream", 1),)


class _Caller(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[misc]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[misc]
    grpc.StreamStreamClientInterceptor,  # type: ignore[misc]
):
    """Client interceptor: adds the default deadline to unary calls and the server's secret to all calls.

    The details are a named tuple in gRPC's implementation (grpcio 1.85).
    """

    def __init__(self, address: str | None) -> None:
        self._address = address

    def _completed(self, details: Any, timeout_s: float | None) -> Any:
        metadata = (*(details.metadata or ()), *proof(self._address))
        return details._replace(timeout=timeout_s, metadata=metadata)

    def intercept_unary_unary(
        self, continuation: Callable[[Any, Any], Any], details: Any, request: Any
    ) -> Any:
        timeout_s = UNARY_TIMEOUT_S if details.timeout is None else details.timeout
        return continuation(self._completed(details, timeout_s), request)

    def intercept_unary_stream(
        self, continuation: Callable[[Any, Any], Any], details: Any, request: Any
    ) -> Any:
        return continuation(self._completed(details, details.timeout), request)

    intercept_stream_stream = intercept_unary_stream


def channel(address: str, peer: str | None = None, tls: Identity | None = None) -> grpc.Channel:
    """Create a gRPC channel to a peer; it connects at the first call and reconnects as needed.

    Args:
        address: host:port of the peer ("[::1]:50051" for IPv6).
        peer: Role required in the peer's certificate; needed with TLS.
        tls: Identity of the caller; None means plain text, with the secret of this user's cluster.
    """
    options = (*channel_options(peer, tls), *_BLOCKING_OPTIONS)
    if tls is None:
        opened = grpc.insecure_channel(address, options=options)
    else:
        opened = grpc.secure_channel(address, tls.channel_credentials(), options=options)
    return grpc.intercept_channel(opened, _Caller(None if tls else address))


def channel_options(peer: str | None, tls: Identity | None) -> tuple[tuple[str, Any], ...]:
    """gRPC options of every channel (arguments: `channel`)."""
    if tls is None:
        return _OPTIONS
    assert peer is not None
    # Accept only a certificate of this role, regardless of the address.
    return (*_OPTIONS, ("grpc.ssl_target_name_override", server_name(peer)))


def leave(call: Any) -> None:
    """Cancel a response stream and free it. For the reading thread; idempotent.

    `call.cancel()` alone leaks about 20 KB per stream that waits in C: gRPC keeps the call until its last
    events are consumed, and a cancelled iterator consumes none.
    """
    call.cancel()
    # There is no public API for this (grpcio 1.85). After a cancel the events arrive at once.
    while isinstance(call, _SingleThreadedRendezvous) and call._state.due:
        call._consume_next_event()


# Own random numbers, because waiting threads must not consume those that others have seeded.
_random = random.Random()


class Backoff:
    """Growing pauses between attempts to connect, with jitter so that members do not retry in lockstep."""

    def __init__(self, first_s: float = 0.1, last_s: float = 1.0) -> None:
        self._first_s = first_s
        self._last_s = last_s
        self._next_s = first_s

    def next_s(self) -> float:
        """Return the seconds to wait before the next attempt, and lengthen the next pause."""
        pause_s = self._next_s
        self._next_s = min(self._last_s, 2 * pause_s)
        return pause_s * _random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Return to the shortest pause, after a success."""
        self._next_s = self._first_s
