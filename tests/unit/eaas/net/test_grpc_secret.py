"""Servers that require a secret."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from eaas import user_files
from eaas.config import MonitorConfig, SecurityConfig
from eaas.health import why_not_serving
from eaas.net import listen_policy, server_records
from eaas.net.async_channel import AsyncChannel
from eaas.net.grpc_aio_server import serve_aio
from eaas.net.grpc_client import channel
from eaas.net.grpc_server import serve
from eaas.net.listen_policy import member_secret, monitor_secret
from eaas.net.tls import Identity

SECRET = "5" * 64
SERVING = health_pb2.HealthCheckResponse.SERVING
ASK = health_pb2.HealthCheckRequest()


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(user_files, "candidates", lambda: (tmp_path / "eaas",))
    return tmp_path / "eaas"


@pytest.fixture(params=["threads", "coroutines"])
def start(request: pytest.FixtureRequest) -> Iterator[Callable[..., str]]:
    """Starts a server of either kind that serves health and reflection alone; returns its address."""
    running: list[Any] = []

    def begin(secret: str | None = SECRET) -> str:
        if request.param == "threads":
            running.append(serve((), "127.0.0.1", 0, secret=secret))
        else:
            running.append(
                serve_aio("none", lambda _: None, "127.0.0.1", 0, 9, 1 << 20, 9, secret=secret)
            )
        running[-1].set_serving(True)
        return str(running[-1].address)

    yield begin
    for server in running:
        server.stop(0)


def watch(opened: Any, metadata: Any = None) -> int:
    call = health_pb2_grpc.HealthStub(opened).Watch(ASK, timeout=20, metadata=metadata)
    try:
        return int(next(call).status)
    finally:
        call.cancel()


def code(call: Callable[[], object]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as error:
        call()
    return error.value.code()


def test_only_callers_with_the_secret_are_accepted(start: Callable[..., str]) -> None:
    address = start()
    refused = grpc.StatusCode.UNAUTHENTICATED
    with grpc.insecure_channel(address) as plain:
        shown: Any
        for shown in (
            None,
            [("authorization", f"Bearer {SECRET[:-1]}")],
            [("authorization", SECRET)],
            [("authorization", f"Bearer {SECRET}"), ("authorization", "Bearer x")],
        ):
            assert code(lambda: watch(plain, shown)) is refused  # noqa: B023
        assert watch(plain, [("authorization", f"Bearer {SECRET}")]) == SERVING
        # Reflection, and a call whose request never comes: neither waits.
        info = reflection_pb2_grpc.ServerReflectionStub(plain).ServerReflectionInfo
        silent = threading.Event()
        requests = (reflection_pb2.ServerReflectionRequest() for _ in iter(silent.wait, True))
        assert code(lambda: list(info(requests, timeout=20))) is refused
        silent.set()
        # A probe needs no secret.
        assert health_pb2_grpc.HealthStub(plain).Check(ASK, timeout=20).status == SERVING
    assert why_not_serving(address) is None


def test_channels_send_the_secret_by_themselves(start: Callable[..., str]) -> None:
    address = start()
    with channel(address) as opened:
        assert watch(opened) == SERVING
    with AsyncChannel(address) as quiet:
        stream = health_pb2_grpc.HealthStub(quiet).Watch(ASK, timeout=20)
        assert next(stream).status == SERVING
        stream.cancel()
    server_records.withdraw(address)
    with channel(address) as opened:
        assert code(lambda: watch(opened)) is grpc.StatusCode.UNAUTHENTICATED


def test_a_server_without_a_secret_removes_an_older_record(
    start: Callable[..., str], place: Path
) -> None:
    address = start()
    assert (place / f"{address}.json").exists()
    server_records.publish("127.0.0.1:1", "x")
    other = start(None)
    assert not (place / f"{other}.json").exists()
    with grpc.insecure_channel(other) as plain:
        assert watch(plain) == SERVING


def test_who_has_a_secret() -> None:
    here = MonitorConfig()
    assert len(bytes.fromhex(monitor_secret(SecurityConfig(), here) or "")) == 32
    assert monitor_secret(SecurityConfig(insecure=True), here) is None
    assert monitor_secret(SecurityConfig(tls_dir="x"), here) is None
    assert monitor_secret(SecurityConfig(), MonitorConfig(host="0.0.0.0")) is None
    shared = MonitorConfig(store="zookeeper")
    assert monitor_secret(SecurityConfig(), shared) == monitor_secret(SecurityConfig(), shared)
    server_records.publish("127.0.0.1:4242", SECRET)
    assert member_secret("127.0.0.1:1,127.0.0.1:4242", "127.0.0.1", None) == SECRET
    assert member_secret("127.0.0.1:4242", "0.0.0.0", None) is None
    assert member_secret("127.0.0.1:4242", "127.0.0.1", Identity.__new__(Identity)) is None


def test_a_member_waits_for_its_monitors_secret_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(listen_policy, "_POLL_S", 0.02)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        open_to_all = "{}:{}".format(*listener.getsockname())
        # It listens, and has left none.
        assert member_secret(open_to_all, "127.0.0.1", None) is None
    assert not caplog.records

    def later() -> None:
        time.sleep(0.2)
        server_records.publish(open_to_all, SECRET)

    monitor = threading.Thread(target=later)
    monitor.start()
    assert member_secret(open_to_all, "127.0.0.1", None) == SECRET
    monitor.join()
    (record,) = caplog.records
    assert record.getMessage() == f"no monitor listens at {open_to_all} yet: waiting for it"
