"""A gRPC channel for long streams, whose readers sleep until a message arrives.

Each blocking stream of gRPC has threads that wake five times a second to check for signals, which is most of
the CPU time of an idle process. Here all streams wait in the one thread of grpc.aio, which does not poll, and
their readers wait on a queue.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Self

import grpc

from eaas.net.grpc_client import STREAM_SILENCE_S, UNARY_TIMEOUT_S, channel_options
from eaas.net.grpc_failure import CallFailure
from eaas.net.grpc_loop import grpc_loop, run_on_loop
from eaas.net.grpc_secret import proof
from eaas.net.tls import Identity

__all__ = ["AsyncChannel", "Responses", "responses"]

# Timeout to create or close a channel, which does not wait for the peer.
_LOCAL_S = 5.0
# Time added to the call's own deadline.
_SLACK_S = 5.0
# Limit of unread messages of a stream. A faster sender has to wait, at most for this time.
_MOST_WAITING = 256
_FULL_S = 0.05


class AsyncChannel:
    """gRPC channel with the methods that generated stubs use, for any thread except that of grpc.aio.

    Unary calls block and have a deadline; there are no futures. Response streams are iterators. Failures are
    both `grpc.RpcError` and `grpc.Call`.

    Args:
        address, peer, tls: See `eaas.net.grpc_client.channel`.
    """

    def __init__(self, address: str, peer: str | None = None, tls: Identity | None = None) -> None:
        self._address = None if tls else address
        options = channel_options(peer, tls)

        async def make() -> grpc.aio.Channel:
            if tls is None:
                return grpc.aio.insecure_channel(address, options)
            return grpc.aio.secure_channel(address, tls.channel_credentials(), options)

        self._channel = run_on_loop(make(), _LOCAL_S)

    def unary_unary(self, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """Make a callable for a method with one request and one response (see `grpc.Channel.unary_unary`)."""
        method = self._channel.unary_unary(*args, **kwargs)

        def call(request: Any, timeout: float = UNARY_TIMEOUT_S) -> Any:
            shown = proof(self._address)

            async def ask() -> Any:
                try:
                    return await method(request, timeout=timeout, metadata=shown)
                except grpc.aio.AioRpcError as error:
                    raise CallFailure.of(error) from None
                except asyncio.CancelledError:
                    raise CallFailure.cancelled() from None

            return run_on_loop(ask(), timeout + _SLACK_S)

        return call

    def unary_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Responses]:
        """Make a callable for a method with one request, many responses (see `grpc.Channel.unary_stream`)."""
        method = self._channel.unary_stream(*args, **kwargs)

        def call(request: Any, timeout: float | None = None) -> Responses:
            return Responses(
                lambda: method(request, timeout=timeout, metadata=proof(self._address))
            )

        return call

    def stream_stream(self, *args: Any, **kwargs: Any) -> Callable[..., Responses]:
        """Make a callable for many requests and responses, such as heartbeats (see `grpc.Channel`)."""
        method = self._channel.stream_stream(*args, **kwargs)

        def call(requests: Iterator[Any], timeout: float | None = None) -> Responses:
            return Responses(
                lambda: method(timeout=timeout, metadata=proof(self._address)), requests
            )

        return call

    def close(self) -> None:
        """Close the gRPC channel, which ends its calls. Idempotent."""
        run_on_loop(self._channel.close(), _LOCAL_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Responses:
    """A gRPC response stream for one reader; any thread may cancel it or add messages to it.

    Iteration raises `grpc.RpcError` if the stream breaks or is cancelled.

    Args:
        start: Starts the call; runs on the loop.
        requests: Requests to send, read by a separate thread until the first one after the stream's end. None
            if `start` sends the only request.
    """

    def __init__(self, start: Callable[[], Any], requests: Iterator[Any] | None = None) -> None:
        # Entries are (message, False); at the end of the stream (None or the failure, True).
        self._inbox: queue.SimpleQueue[tuple[Any, bool]] = queue.SimpleQueue()
        self._task: asyncio.Task[None] | None = None
        grpc_loop().call_soon_threadsafe(self._start, start, requests)

    def cancel(self) -> None:
        """End the gRPC stream: a waiting reader gets a CANCELLED error. For any thread; idempotent."""
        grpc_loop().call_soon_threadsafe(self._stop)

    def add(self, message: Any) -> None:
        """Put a message into the stream as if the peer had sent it: a sign of life, seen in a heartbeat."""
        self._inbox.put((message, False))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        return self.next()

    def next(self, silence_s: float | None = None) -> Any:
        """Wait for the next message, like `__next__`. Raises TimeoutError after `silence_s` without one."""
        try:
            item, is_end = self._inbox.get(timeout=silence_s)
        except queue.Empty:
            raise TimeoutError(f"nothing heard for {silence_s:g} s") from None
        if not is_end:
            return item
        self._inbox.put((item, True))
        if item is None:
            raise StopIteration
        raise item

    # -- on the loop ---------------------------------------------------------------------------

    def _start(self, start: Callable[[], Any], requests: Iterator[Any] | None) -> None:
        self._task = asyncio.get_running_loop().create_task(self._read(start, requests))
        self._task.add_done_callback(self._ended)

    def _stop(self) -> None:
        # The loop runs this after `_start`.
        assert self._task is not None
        self._task.cancel()

    async def _read(self, start: Callable[[], Any], requests: Iterator[Any] | None) -> None:
        call = start()
        if requests is not None:
            threading.Thread(
                target=_send, args=(call, requests), name="grpc-requests", daemon=True
            ).start()
        async for message in call:
            while self._inbox.qsize() >= _MOST_WAITING:
                await asyncio.sleep(_FULL_S)
            self._inbox.put((message, False))

    def _ended(self, task: asyncio.Task[None]) -> None:
        # Also called if the task was cancelled before its first step, or the channel was closed.
        error = CallFailure.cancelled() if task.cancelled() else task.exception()
        if isinstance(error, grpc.aio.AioRpcError):
            error = CallFailure.of(error)
        self._inbox.put((error, True))


def responses(call: Responses, silence_s: float = STREAM_SILENCE_S) -> Iterator[Any]:
    """Iterate over a gRPC response stream; the call is cancelled when the iteration ends.

    Raises:
        TimeoutError: No message for `silence_s` seconds, connecting included.
        grpc.RpcError: The stream broke.
    """
    try:
        while True:
            try:
                message = call.next(silence_s)
            except StopIteration:
                return
            yield message
    finally:
        call.cancel()


def _send(call: Any, requests: Iterator[Any]) -> None:
    """Write requests to the stream as fast as the peer reads them, until the requests or the call end."""
    for request in requests:
        if not run_on_loop(_written(call, request), None):
            return
    run_on_loop(_written(call, None), None)


async def _written(call: Any, request: Any | None) -> bool:
    """Write one request to the stream, or half-close for None; return whether the call continues."""
    try:
        await (call.done_writing() if request is None else call.write(request))
    except (grpc.RpcError, asyncio.CancelledError, asyncio.InvalidStateError):
        # The reader gets the error.
        return False
    return True
