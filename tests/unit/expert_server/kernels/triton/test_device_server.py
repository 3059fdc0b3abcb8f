"""An expert server and its loop on a fake device."""

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from eaas.config import ExpertServerConfig, MonitorConfig
from eaas.errors import ConfigError, DeviceLostError, PortInUseError
from eaas.types import Member
from eaas.wire import SlotState
from eaas.wire.header import WireDtype
from eaas.wire.slot import Status
from eaas_cli.demo_model import write_demo_model
from expert_server import main
from expert_server.kernels import KernelSpec
from expert_server.main import ExpertServer
from expert_server.weights.weights import ExpertForm, ExpertWeights
from fake_device import FakeDevice, Waits
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
    monkeypatch.setattr("expert_server.kernels.gpu.device.find_device", lambda _name: device)
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


def test_slots_are_locked_and_experts_limited_while_it_runs(start, device) -> None:
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


def test_a_device_that_is_lost_in_a_load_ends_the_server(start, device, monkeypatch) -> None:
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


# The interpreter takes a tenth of a second for a batch.
BUDGET_US = 60_000_000


class Setup:
    """A loop whose kernel multiplies by the expert's number (from 1), for x >= 0, on a fake device."""

    def __init__(self, benches) -> None:
        self.device = FakeDevice()
        form = ExpertForm(False, False, torch.relu)
        self.kernel = interpreted_kernel()([form] * 4, KernelSpec(torch.float32), self.device)
        one = torch.eye(benches.hidden)
        for expert in range(3):
            self.kernel.load(0, expert, ExpertWeights(one * (expert + 1), one))
        self.bench = benches(kernel=self.kernel)
        self.kernel.pin_slots(self.bench.arena.buffer)
        self.device.calls.clear()

    def write(self, client: str, x: float, expert: int = 1, **fields) -> int:
        slot: int = self.bench.write(
            self.bench.grant(client), x, expert, budget_us=BUDGET_US, **fields
        )
        return slot


@pytest.fixture
def setup(benches) -> Iterator[Setup]:
    setup = Setup(benches)
    yield setup
    setup.kernel.close()
    assert setup.device.pinned_bytes == 0


@pytest.mark.parametrize("dtype", [WireDtype.FLOAT32, WireDtype.BFLOAT16])
def test_a_batch_of_three_clients_has_one_wait_and_so_has_one_alone_with_a_checksum(
    setup, dtype: WireDtype
) -> None:
    xs = (2.0, 3.0, 5.0)
    # The bits of bfloat16 are written, not its values.
    bits = [int(torch.tensor(x).bfloat16().view(torch.int16)) for x in xs]
    values = bits if dtype is WireDtype.BFLOAT16 else xs
    slots = [setup.write(name, x, dtype=dtype) for name, x in zip("abc", values, strict=True)]
    with Waits() as waits:
        setup.bench.serve(*slots)
    assert setup.device.calls == {"copy to": 3 + 1, "copy back": 3, "wait": 1}
    assert not waits.names
    for slot, x in zip(slots, xs, strict=True):
        assert (setup.bench.rows(slot) == x * 2 * setup.bench.top_k).all()
    grant = setup.bench.grant("a")
    slot = setup.bench.write(grant, 2, budget_us=BUDGET_US, checksum=True)
    setup.device.calls.clear()
    setup.bench.serve(slot)
    assert setup.device.calls == {"copy to": 2, "copy back": 1, "wait": 1}
    status, rows_TH = setup.bench.take(grant, slot, checksum=True)
    assert (status, rows_TH[0, 0]) == (Status.OK, 8)


def test_an_expert_that_is_not_held_fails_only_its_own_request(setup) -> None:
    slots = [setup.write("a", 2), setup.write("b", 3, 3), setup.write("c", 5)]
    setup.bench.serve(*slots)
    assert setup.bench.result(slots[1]).status == Status.STALE_PLACEMENT
    assert [setup.bench.rows(slot)[0, 0] for slot in (slots[0], slots[2])] == [8, 20]


def test_the_answer_to_a_slot_revoked_meanwhile_is_dropped(setup) -> None:
    bench = setup.bench
    kept = setup.write("kept", 2)
    gone = bench.grant("gone")
    slot = bench.write(gone, 3, budget_us=BUDGET_US)

    def revoke(copies: int) -> None:
        setup.device.fails = lambda _copies: None
        bench.table.revoke(gone.connection_id)

    setup.device.fails = revoke
    bench.serve(kept, slot)
    assert (bench.rows(kept) == 8).all()
    assert bench.arena.flags.load(slot) == SlotState.OFFLINE


def test_a_device_that_fails_refuses_its_batch(setup) -> None:
    def fail(copies: int) -> None:
        setup.device.fails = lambda _copies: None
        raise RuntimeError("an illegal address")

    slot = setup.write("a", 2)
    setup.device.fails = fail
    setup.bench.serve(slot)
    assert setup.bench.result(slot).status == Status.INTERNAL
    slot = setup.write("b", 2)
    setup.bench.serve(slot)
    assert (setup.bench.rows(slot) == 8).all()


def test_a_lost_device_ends_the_loop(setup) -> None:
    def fail(copies: int) -> None:
        raise RuntimeError("an illegal address")

    setup.write("a", 2)
    setup.device.fails, setup.device.is_lost = fail, True
    with pytest.raises(DeviceLostError):
        setup.bench.loop.run()


def test_the_slots_memory_is_freed_when_loop_kernel_and_arena_are_closed(setup) -> None:
    bench = setup.bench
    setup.bench.serve(setup.write("a", 2))
    buffer = bench.arena.buffer
    bench.loop.stop()
    bench.loop.run()
    setup.kernel.close()
    bench.arena.close()
    with pytest.raises(ValueError, match="closed"):
        len(buffer)
