"""How every process of the cluster calls another one: no call without an end.

Unary calls get a deadline where the caller states none. A stream has no useful deadline; its sender
speaks every `STREAM_SIGN_S` at least instead, and `responses` gives up on one that stays silent.
"""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grpc
from grpc._channel import _SingleThreadedRendezvous

from eaas.grpc_secret import proof
from eaas.tls import Identity, server_name

__all__ = [
    "MESSAGE_BYTES",
    "MOST_WAITING",
    "STREAM_SIGN_S",
    "STREAM_SILENCE_S",
    "UNARY_TIMEOUT_S",
    "Backoff",
    "channel",
    "channel_options",
    "leave",
    "responses",
]

MESSAGE_BYTES = 64 << 20
"""Cap of one message, both ways."""

MOST_WAITING = 256
"""Messages of a stream that wait for their reader; a sender that is faster waits, too."""

UNARY_TIMEOUT_S = 5.0
"""Deadline of a unary call that states none."""

STREAM_SIGN_S = 2.0
"""The sender of a long stream gives a sign of life after this silence of its own."""

STREAM_SILENCE_S = 5.0
"""A stream is given up after this silence: two signs of life did not come."""

_OPTIONS = (
    ("grpc.max_send_message_length", MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MESSAGE_BYTES),
    # No ping beside every message to measure the path: windows are fixed, and idle processes stay idle.
    ("grpc.http2.bdp_probe", 0),
    # gRPC's client sends no keepalive by itself: a peer that vanished without a RST would hold a
    # stream for as long as TCP retries.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    # An http_proxy in the environment is not meant for the members of a cluster.
    ("grpc.enable_http_proxy", 0),
    # A connection of its own: shared ones share the pause after a refusal, too, also with a channel to
    # a process that was before at the same port.
    ("grpc.use_local_subchannel_pool", 1),
    # By default a channel waits up to two minutes before it tries a returned peer again.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # Time that one attempt to connect may take, whatever its name says.
    ("grpc.min_reconnect_backoff_ms", 2_000),
)
# Until the end of a stream whose reader is gone is noticed, where its messages wait.
_FULL_S = 0.5
# Response streams wait in C instead of waking Python ten times a second.
_BLOCKING_OPTIONS = (("SingleThreadedUnaryStream", 1),)


class _CallDetails(NamedTuple):
    method: str
    timeout: float | None
    metadata: Any
    credentials: Any
    wait_for_ready: bool | None
    compression: Any


class _Caller(
    grpc.UnaryUnaryClientInterceptor,  # type: ignore[misc]
    grpc.UnaryStreamClientInterceptor,  # type: ignore[misc]
    grpc.StreamStreamClientInterceptor,  # type: ignore[misc]
):
    """Gives a unary call its deadline, and every call what the server at the address asks for."""

    def __init__(self, address: str | None, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s

    def _with_proof(self, details: Any, timeout: float | None) -> _CallDetails:
        return _CallDetails(
            details.method,
            timeout,
            (*(details.metadata or ()), *proof(self._address)),
            details.credentials,
            details.wait_for_ready,
            details.compression,
        )

    def intercept_unary_unary(
        self, continuation: Callable[[Any, Any], Any], details: Any, request: Any
    ) -> Any:
        timeout_s = self._timeout_s if details.timeout is None else details.timeout
        return continuation(self._with_proof(details, timeout_s), request)

    def intercept_unary_stream(
        self, continuation: Callable[[Any, Any], Any], details: Any, request: Any
    ) -> Any:
        return continuation(self._with_proof(details, details.timeout), request)

    def intercept_stream_stream(
        self, continuation: Callable[[Any, Any], Any], details: Any, requests: Any
    ) -> Any:
        return continuation(self._with_proof(details, details.timeout), requests)


def channel(
    address: str,
    peer: str | None = None,
    tls: Identity | None = None,
    timeout_s: float = UNARY_TIMEOUT_S,
) -> grpc.Channel:
    """A channel to `host:port`; it connects at the first call and again whenever it has to.

    Args:
        address: host:port of the peer ("[::1]:50051" for IPv6).
        peer: Role that the peer's certificate has to name; to be given where there is TLS.
        tls: Who calls; None: plain text, with the secret of a server of this user's cluster.
        timeout_s: Deadline of a unary call that states none.
    """
    options = (*channel_options(peer, tls), *_BLOCKING_OPTIONS)
    if tls is None:
        line = grpc.insecure_channel(address, options=options)
    else:
        line = grpc.secure_channel(address, tls.channel_credentials(), options=options)
    return grpc.intercept_channel(line, _Caller(None if tls else address, timeout_s))


def channel_options(peer: str | None, tls: Identity | None) -> tuple[tuple[str, Any], ...]:
    """What every channel is set to (arguments: `channel`)."""
    if tls is None:
        return _OPTIONS
    assert peer is not None
    # Whoever is at the address: only a certificate of that role is taken.
    return (*_OPTIONS, ("grpc.ssl_target_name_override", server_name(peer)))


def leave(call: Any) -> None:
    """Ends a stream and lets go of it. For the thread that reads it; idempotent.

    `call.cancel()` alone leaks about 20 KB of a response stream that waits in C: gRPC keeps the call for
    good, even past its channel, until its last events are taken, and a cancelled one's iterator takes none.
    """
    call.cancel()
    # There is no public way to them (grpcio 1.85). After a cancel they come at once.
    while isinstance(call, _SingleThreadedRendezvous) and call._state.due:
        call._consume_next_event()


def responses(
    call: Any,
    silence_s: float = STREAM_SILENCE_S,
    inbox: queue.Queue[Any] | None = None,
) -> Iterator[Any]:
    """The messages of a response stream; the call is cancelled however the iteration ends.

    Args:
        call: The stream.
        silence_s: Longest silence.
        inbox: What others put there comes among the messages, and breaks the silence. By default one of
            `MOST_WAITING` messages.

    Raises:
        TimeoutError: Nothing came for `silence_s` seconds (connecting included).
        grpc.RpcError: The stream broke; its `code()` tells how.
    """
    messages: queue.Queue[Any] = queue.Queue(MOST_WAITING) if inbox is None else inbox
    end, over = object(), threading.Event()

    def put(item: Any) -> None:
        while not over.is_set():
            try:
                return messages.put(item, timeout=_FULL_S)
            except queue.Full:
                continue

    def pump() -> None:
        # gRPC's iterator takes no timeout: a thread of its own waits for it.
        try:
            for message in call:
                put(message)
        except grpc.RpcError as error:
            put(error)
        else:
            put(end)
        leave(call)

    threading.Thread(target=pump, name="grpc-responses", daemon=True).start()
    try:
        while True:
            try:
                item = messages.get(timeout=silence_s)
            except queue.Empty:
                raise TimeoutError(f"nothing heard for {silence_s:g} s") from None
            if item is end:
                return
            if isinstance(item, grpc.RpcError):
                raise item
            yield item
    finally:
        over.set()
        call.cancel()


# Of its own: threads that wait are not to turn the dice that others have seeded.
_dice = random.Random()


class Backoff:
    """Growing pauses between attempts, jittered so that members do not march in step."""

    def __init__(self, first_s: float = 0.1, last_s: float = 1.0) -> None:
        self._first_s = first_s
        self._last_s = last_s
        self._next_s = first_s

    def next_s(self) -> float:
        """Seconds to wait before the next attempt."""
        pause_s = self._next_s
        self._next_s = min(self._last_s, 2 * pause_s)
        return pause_s * _dice.uniform(0.5, 1.0)

    def reset(self) -> None:
        """An attempt succeeded: the next pause is the first one again."""
        self._next_s = self._first_s
