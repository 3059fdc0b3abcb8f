"""gRPC servers and channels: ports, health, reflection, deadlines, silence."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from eaas.errors import ConfigError, PortInUseError
from eaas.net.async_channel import AsyncChannel, responses
from eaas.net.grpc_client import Backoff, channel, leave
from eaas.net.grpc_server import RunningServer, Service, serve
from eaas.open_files import free_files
from eaas.rpc.v1 import balancer_pb2, balancer_pb2_grpc
from few_files import few_files
from half_sender import half_senders

NAME = "eaas.rpc.v1.BalancerService"

each_channel = pytest.mark.parametrize("connect", [channel, AsyncChannel])
Connect = Callable[..., Any]


class Answers(balancer_pb2_grpc.BalancerServiceServicer):
    """A BalancerService whose streams send `epochs` and then stay silent."""

    def __init__(self, *epochs: int) -> None:
        self.epochs = epochs
        self.time_left: float | None = None
        self.over = threading.Event()

    def GetPlacement(self, request: Any, context: Any) -> balancer_pb2.GetPlacementResponse:
        self.time_left = context.time_remaining()
        return balancer_pb2.GetPlacementResponse()

    def unused(self, request: Any, context: Any) -> None:
        raise AssertionError("unexpected call")

    DrainServer = Scale = GetScale = WatchScale = unused

    def WatchPlacement(
        self, request: Any, context: Any
    ) -> Iterator[balancer_pb2.WatchPlacementResponse]:
        context.add_callback(self.over.set)
        for epoch in self.epochs:
            yield balancer_pb2.WatchPlacementResponse(epoch=epoch)
        if request.known_epoch != 99:
            self.over.wait(30)


def start(answers: Answers, **kwargs: Any) -> RunningServer:
    add = balancer_pb2_grpc.add_BalancerServiceServicer_to_server
    return serve([Service(NAME, add, answers)], **({"host": "127.0.0.1", "port": 0} | kwargs))


@pytest.fixture
def answers() -> Answers:
    return Answers(1, 2)


@pytest.fixture
def server(answers: Answers) -> Iterator[RunningServer]:
    running = start(answers)
    yield running
    running.stop(0)


def health_of(opened: grpc.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(opened)
    return int(stub.Check(health_pb2.HealthCheckRequest(service=service)).status)


def test_health_follows_set_serving(server: RunningServer) -> None:
    status = health_pb2.HealthCheckResponse
    with channel(server.address) as opened:
        for name in ("", NAME):
            assert health_of(opened, name) == status.NOT_SERVING
        server.set_serving(True)
        for name in ("", NAME):
            assert health_of(opened, name) == status.SERVING
        server.set_serving(False)
        assert health_of(opened, NAME) == status.NOT_SERVING


def test_reflection_lists_the_services(server: RunningServer) -> None:
    with channel(server.address) as opened:
        stub = reflection_pb2_grpc.ServerReflectionStub(opened)
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        (response,) = stub.ServerReflectionInfo(iter([request]), timeout=5)
    names = {service.name for service in response.list_services_response.service}
    assert {NAME, "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_port_in_use_is_an_error(server: RunningServer, host: str) -> None:
    """36: port already bound: start fails loudly."""
    port = int(server.address.rsplit(":", 1)[1])
    with pytest.raises(PortInUseError, match=rf"{host}:{port} is in use: choose another port"):
        start(Answers(), host=host, port=port)


def test_a_port_is_free_again_after_stop(answers: Answers) -> None:
    first = start(answers)
    port = int(first.address.rsplit(":", 1)[1])
    with channel(first.address) as opened:
        balancer_pb2_grpc.BalancerServiceStub(opened).GetPlacement(
            balancer_pb2.GetPlacementRequest()
        )
    first.stop(0)
    second = start(answers, port=port)
    assert second.address == first.address
    second.stop(0)


def test_a_host_of_another_machine_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1:0"):
        start(Answers(), host="192.0.2.1")
    with pytest.raises(ConfigError, match=r"no-such-host\.invalid"):
        start(Answers(), host="no-such-host.invalid")


@pytest.mark.parametrize(
    ("host", "shown"),
    [("::1", "[::1]"), ("[::1]", "[::1]"), ("0.0.0.0", socket.gethostname())],
)
def test_the_address_of_a_host(host: str, shown: str, answers: Answers) -> None:
    """A wildcard is replaced by the host's name."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        if "::1" in host:
            pytest.skip("this machine has no IPv6")
    running = start(answers, host=host)
    assert running.address.rsplit(":", 1)[0] == shown
    with channel(running.address.replace(socket.gethostname(), "127.0.0.1")) as opened:
        assert health_of(opened, NAME) == health_pb2.HealthCheckResponse.NOT_SERVING
    running.stop(0)


def test_a_full_server_refuses_at_once() -> None:
    answers = Answers(1)
    running = start(answers, max_workers=1)
    with channel(running.address) as opened:
        stub = balancer_pb2_grpc.BalancerServiceStub(opened)
        held = stub.WatchPlacement(balancer_pb2.WatchPlacementRequest())
        assert next(held).epoch == 1
        with pytest.raises(grpc.RpcError) as caught:
            stub.GetPlacement(balancer_pb2.GetPlacementRequest())
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        held.cancel()
    running.stop(0)


def test_connections_leave_file_descriptors_to_the_process() -> None:
    with few_files(80):
        server = serve([], "127.0.0.1", 0)
        try:
            with half_senders(server.address, "silent", 200):
                for _ in range(5):
                    assert free_files() > 5
                    time.sleep(0.05)
            with channel(server.address) as opened:
                stub = health_pb2_grpc.HealthStub(opened)
                answer = stub.Check(
                    health_pb2.HealthCheckRequest(), timeout=10, wait_for_ready=True
                )
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
        finally:
            server.stop(0.0)


@each_channel
def test_unary_calls_have_a_deadline(
    connect: Connect, server: RunningServer, answers: Answers
) -> None:
    with connect(server.address) as opened:
        stub = balancer_pb2_grpc.BalancerServiceStub(opened)
        stub.GetPlacement(balancer_pb2.GetPlacementRequest())
        assert answers.time_left is not None
        assert 3.0 < answers.time_left < 6.0
        stub.GetPlacement(balancer_pb2.GetPlacementRequest(), timeout=100.0)
        assert 90.0 < answers.time_left < 110.0


def test_proxies_are_ignored(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    with channel(server.address) as opened:
        assert health_of(opened, NAME) == health_pb2.HealthCheckResponse.NOT_SERVING


def watch(opened: Any, known_epoch: int = 0) -> Any:
    stub = balancer_pb2_grpc.BalancerServiceStub(opened)
    return stub.WatchPlacement(balancer_pb2.WatchPlacementRequest(known_epoch=known_epoch))


def test_a_stream_ends_by_itself_for_its_silence_or_without_its_reader(
    server: RunningServer, answers: Answers
) -> None:
    with AsyncChannel(server.address) as opened:
        assert [r.epoch for r in responses(watch(opened, known_epoch=99))] == [1, 2]
        assert answers.over.wait(5)
        answers.over.clear()
        stream = responses(watch(opened), silence_s=0.3)
        assert [next(stream).epoch, next(stream).epoch] == [1, 2]
        with pytest.raises(TimeoutError, match=r"nothing heard for 0\.3 s"):
            next(stream)
        assert answers.over.wait(5)
        answers.over.clear()
        stream = responses(watch(opened))
        assert next(stream).epoch == 1
        stream.close()
        assert answers.over.wait(5)


def left_in_the_middle(opened: Any) -> None:
    call = watch(opened)
    assert next(call).epoch == 1
    leave(call)


def left_unread(opened: Any) -> None:
    leave(watch(opened))


def left_by_its_reader(opened: Any) -> None:
    stream = responses(watch(opened))
    assert next(stream).epoch == 1
    stream.close()


@pytest.mark.parametrize(
    ("connect", "left"),
    [
        (channel, left_in_the_middle),
        (channel, left_unread),
        (AsyncChannel, left_unread),
        (AsyncChannel, left_by_its_reader),
    ],
)
def test_a_left_stream_is_freed(
    connect: Connect, server: RunningServer, left: Callable[[Any], None]
) -> None:
    process, streams = psutil.Process(), 300

    with connect(server.address) as opened:
        for _ in range(streams):
            left(opened)
        gc.collect()
        before = process.memory_info().rss
        for _ in range(streams):
            left(opened)
        gc.collect()
        # A stream that is only cancelled leaks 20 KB.
        assert process.memory_info().rss - before < streams * 10_000


def test_a_broken_stream_is_an_rpc_error(answers: Answers) -> None:
    running = start(answers)
    with AsyncChannel(running.address) as opened:
        stream = responses(watch(opened))
        assert next(stream).epoch == 1
        running.stop(0)
        with pytest.raises(grpc.RpcError):
            list(stream)


def test_backoff_grows_to_its_cap_and_starts_again() -> None:
    backoff = Backoff(0.1, 0.8)
    for cap in (0.1, 0.2, 0.4, 0.8, 0.8, 0.8):
        assert cap / 2 <= backoff.next_s() <= cap
    backoff.reset()
    assert backoff.next_s() <= 0.1


@each_channel
def test_a_refused_connection_fails_at_once(connect: Connect) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    started = time.monotonic()
    request = health_pb2.HealthCheckRequest()
    with (
        connect(f"127.0.0.1:{port}") as opened,
        pytest.raises(grpc.RpcError) as caught,
    ):
        health_pb2_grpc.HealthStub(opened).Check(request, timeout=60.0)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert time.monotonic() - started < 30.0
