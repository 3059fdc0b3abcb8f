"""Streams of one thread: many requests, cancellation at any moment, errors with details."""

from __future__ import annotations

import asyncio
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import grpc
import pytest

from eaas.net.async_channel import AsyncChannel
from eaas.net.grpc_loop import run_on_loop

ECHO, REFUSE, NAP = "/test.Async/Echo", "/test.Async/Refuse", "/test.Async/Nap"


class Handlers:
    """Echoes until the requests end; refuses; naps until it is cancelled."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def echo(self, requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
        context.add_callback(self.over.set)
        for request in requests:
            if request == b"end":
                return
            yield request

    def refuse(self, request: bytes, context: Any) -> bytes:
        context.set_trailing_metadata((("why", "tired"),))
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "not today")
        raise AssertionError("abort raises")

    def nap(self, request: bytes, context: Any) -> bytes:
        context.add_callback(self.over.set)
        self.over.wait(30)
        return b""


@pytest.fixture
def handlers() -> Handlers:
    return Handlers()


@pytest.fixture
def channel(handlers: Handlers) -> Iterator[AsyncChannel]:
    server = grpc.server(futures.ThreadPoolExecutor(4))
    methods = {
        "Echo": grpc.stream_stream_rpc_method_handler(handlers.echo),
        "Refuse": grpc.unary_unary_rpc_method_handler(handlers.refuse),
        "Nap": grpc.unary_unary_rpc_method_handler(handlers.nap),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Async", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with AsyncChannel(f"127.0.0.1:{port}") as made:
        yield made
    server.stop(0).wait()


def code_of(reading: Callable[[], object]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as caught:
        reading()
    assert isinstance(caught.value, grpc.Call)
    code: grpc.StatusCode = caught.value.code()
    return code


def test_requests_and_responses_arrive_in_order_up_to_the_end(channel: AsyncChannel) -> None:
    # More than may wait unread.
    sent = [str(number).encode() for number in range(1000)]
    assert list(channel.stream_stream(ECHO)(iter(sent))) == sent
    requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    answers = channel.stream_stream(ECHO)(iter(requests.get, None))
    for word in (b"one", b"two"):
        requests.put(word)
        assert next(answers) == word
    requests.put(b"end")
    assert list(answers) == []
    assert list(answers) == []
    requests.put(None)


def test_an_error_has_its_code_details_and_metadata(channel: AsyncChannel) -> None:
    with pytest.raises(grpc.RpcError, match="FAILED_PRECONDITION: not today") as caught:
        channel.unary_unary(REFUSE)(b"")
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.details() == "not today"
    assert ("why", "tired") in [tuple(pair) for pair in caught.value.trailing_metadata()]


def test_a_deadline_ends_the_call_on_both_sides(channel: AsyncChannel, handlers: Handlers) -> None:
    assert (
        code_of(lambda: channel.unary_unary(NAP)(b"", timeout=0.2))
        is grpc.StatusCode.DEADLINE_EXCEEDED
    )
    assert handlers.over.wait(5)


@pytest.mark.parametrize("after_s", [0.0, 0.001, 0.05])
def test_a_cancelled_stream_ends_for_its_reader_and_for_the_server(
    channel: AsyncChannel, handlers: Handlers, after_s: float
) -> None:
    requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    answers = channel.stream_stream(ECHO)(iter(requests.get, None))
    time.sleep(after_s)
    answers.cancel()
    answers.cancel()
    assert code_of(lambda: next(answers)) is grpc.StatusCode.CANCELLED
    assert code_of(lambda: next(answers)) is grpc.StatusCode.CANCELLED
    # A sender sees it at its next request.
    requests.put(b"late")
    requests.put(None)
    if after_s >= 0.05:
        assert handlers.over.wait(5)


def test_closing_the_channel_ends_its_streams(channel: AsyncChannel) -> None:
    requests: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    answers = channel.stream_stream(ECHO)(iter(requests.get, None))
    requests.put(b"one")
    assert next(answers) == b"one"
    ends: queue.SimpleQueue[grpc.StatusCode] = queue.SimpleQueue()
    reader = threading.Thread(target=lambda: ends.put(code_of(lambda: next(answers))))
    reader.start()
    time.sleep(0.05)
    channel.close()
    assert ends.get(timeout=5) is grpc.StatusCode.CANCELLED
    reader.join()
    requests.put(None)


def test_the_loop_has_a_timeout() -> None:
    with pytest.raises(TimeoutError):
        run_on_loop(asyncio.sleep(5), 0.05)


def test_grpc_knows_the_configured_experiments() -> None:
    """gRPC would log an unknown experiment."""
    program = "import eaas, grpc; grpc.insecure_channel('127.0.0.1:1').close()"
    command = [sys.executable, "-c", program]
    assert subprocess.check_output(command, stderr=subprocess.STDOUT, timeout=60) == b""
