"""An expert server on a fake device: it page-locks its slots, reports the memory for experts, and ends."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from eaas.config import ExpertServerConfig, MonitorConfig
from eaas.errors import ConfigError, DeviceLostError, PortInUseError
from eaas.types import Member
from eaas_cli.demo_model import write_demo_model
from expert_server import main
from expert_server.main import ExpertServer
from fake_device import FakeDevice
from interpreted_triton import interpreted_kernel, needs_triton
from monitor.main import Monitor

pytestmark = needs_triton

Start = Callable[..., contextlib.AbstractContextManager[tuple[ExpertServer, Member]]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "x"
    write_demo_model(path, "qwen3_moe", layers=1, hidden=64, experts=2, top_k=1, vocab=262)
    return path


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice(free=10**9)
    interpreted_kernel()
    monkeypatch.setattr("expert_server.kernels.gpu.cuda.find_device", lambda _name: device)
    return device


@pytest.fixture
def start(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a server; the test gets it, and the member that it registers as."""
    joined: list[Member] = []

    class Session(main.MemberSession):
        def __init__(self, monitor: str, member: Member, **options: object) -> None:
            joined.append(member)
            super().__init__(monitor, member, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(main, "MemberSession", Session)
    monitor = Monitor(MonitorConfig())

    @contextlib.contextmanager
    def start(**settings: object) -> Iterator[tuple[ExpertServer, Member]]:
        config = ExpertServerConfig(device="cuda:1", threads=1, **settings)  # type: ignore[arg-type]
        server = ExpertServer(str(path), "gpu", monitor.address, config, lambda *_: None)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield server, joined[-1]
        finally:
            server.stop()
            thread.join(30)
            assert not thread.is_alive()

    yield start
    monitor.stop()


def test_slots_are_locked_and_experts_limited_while_it_runs(
    start: Start, device: FakeDevice
) -> None:
    with start() as (server, member):
        assert device.pinned_bytes == server._arena.size
        assert 0.9e9 < member.memory_bytes < 1e9
        # Gate, up and down of an expert, in float32 or more.
        assert member.expert_bytes >= 3 * 64 * 4
        assert server._kernel.count == 0
    assert device.pinned_bytes == 0
    with start(memory_bytes=10**6) as (_, member):
        assert member.memory_bytes == 10**6


def test_more_memory_than_the_device_has_is_refused(start: Start, device: FakeDevice) -> None:
    with (
        pytest.raises(ConfigError, match=r"expert_server.memory_bytes 2000000000: fake has"),
        start(memory_bytes=2 * 10**9),
    ):
        pass


def test_a_start_that_fails_unlocks_the_slots(start: Start, device: FakeDevice) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(PortInUseError),
        start(port=taken.getsockname()[1]),
    ):
        pass
    assert device.pinned_bytes == 0


def test_a_device_that_is_lost_in_a_load_ends_the_server(
    start: Start, device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[DeviceLostError] = []
    run = ExpertServer.run

    def noted(server: ExpertServer) -> None:
        try:
            run(server)
        except DeviceLostError as error:
            ended.append(error)

    monkeypatch.setattr(ExpertServer, "run", noted)
    with start() as (server, _):
        device.is_lost = True
        with pytest.raises(DeviceLostError) as raised:
            server._store.load({0: [0]})
        server._on_lost(raised.value)
    assert ended == [raised.value]
    assert device.pinned_bytes == 0
