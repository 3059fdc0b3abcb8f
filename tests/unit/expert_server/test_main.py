"""A server's kernel line, its compute dtype, and the remains of a failed start."""

import contextlib
import errno
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest
import torch

from eaas.checkpoint import Checkpoint
from eaas.config import ExpertServerConfig
from eaas.errors import CheckpointError, PortInUseError, SharedMemoryError
from eaas.membership.cluster_view import MembershipView
from eaas.net import server_records
from eaas.types import Member, MemberState, Role
from eaas.wire import Arena
from eaas.wire.arena import SHM_DIRECTORY
from eaas_cli.demo_model import write_demo_model
from expert_server.kernels import KernelSpec, Quantization, ReferenceKernel
from expert_server.kernels.spec import compute_dtype
from expert_server.main import ExpertServer, _describe
from expert_server.transports.slot_ownership import SlotTable
from expert_server.weights.reader import ExpertReader
from expert_server.weights.weights import ExpertWeights

# Nobody listens there.
MONITOR = "127.0.0.1:1"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "x"
    write_demo_model(path, "qwen3_moe", layers=2, hidden=64, experts=2, top_k=1, vocab=262)
    return path


@pytest.fixture
def reader(path: Path) -> ExpertReader:
    return ExpertReader(Checkpoint.open(path))


def kernel(reader: ExpertReader, spec: KernelSpec) -> ReferenceKernel:
    return ReferenceKernel(reader.forms, spec)


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16, torch.float64])
def test_supported_dtypes_are_kept(own: torch.dtype) -> None:
    assert compute_dtype(own, None) == own


def test_float16_is_computed_exactly() -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    numbers = every[~every.isnan()]
    dtype = compute_dtype(torch.float16, None)
    assert dtype != torch.float16
    assert torch.equal(numbers.to(dtype).half(), numbers)


def test_the_kernel_line_names_instructions_and_another_dtype(reader: ExpertReader) -> None:
    class Native(ReferenceKernel):
        name = "native"
        isa = "amx"

    assert _describe(kernel(reader, KernelSpec(torch.float32)), reader) == "reference (float32)"
    line = _describe(Native(reader.forms, KernelSpec(torch.bfloat16)), reader)
    assert line == "native (bfloat16 for float32, amx)"


def test_quantised_weights_have_an_error(reader: ExpertReader) -> None:
    percent = {}
    for quantization in (Quantization.INT8, Quantization.INT4):
        line = _describe(kernel(reader, KernelSpec(torch.float32, quantization)), reader)
        begin, _, value = line.removesuffix(" %").rpartition(" ")
        assert begin == f"reference (float32); {quantization} weights: relative error"
        percent[quantization] = float(value)
    assert 0.1 < percent[Quantization.INT8] < 2 < percent[Quantization.INT4] < 25


def test_an_expert_without_an_error_is_named(reader, monkeypatch) -> None:
    read = reader.read

    def damaged(layer: int, experts: list[int]) -> Iterator[tuple[int, ExpertWeights]]:
        for expert, weights in read(layer, experts):
            yield expert, replace(weights, down=weights.down / 0) if layer else weights

    monkeypatch.setattr(reader, "read", damaged)
    with pytest.raises(CheckpointError, match=r"^layer 1, expert 0: weights are NaN or infinite"):
        _describe(kernel(reader, KernelSpec(torch.float32, Quantization.INT8)), reader)


# -- a start that fails -------------------------------------------------------------------------------


@pytest.fixture
def start(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Start a server at this port; check that nothing of it remains."""
    closed: list[ReferenceKernel] = []
    monkeypatch.setattr(ReferenceKernel, "close", lambda kernel: closed.append(kernel))
    switch_s, arenas = sys.getswitchinterval(), arenas_of_this_process()
    seen = Arena.create_shared(2, 64, 64, 1)
    assert arenas_of_this_process() > arenas
    seen.close()
    # Without its monitor's record, a server waits for the monitor.
    server_records.publish(MONITOR, server_records.new_secret())

    def start(port: int) -> None:
        config = ExpertServerConfig(kernel="reference", threads=1, port=port)
        ExpertServer(str(path), "server", MONITOR, config, lambda *_: None)

    yield start
    server_records.withdraw(MONITOR)
    sys.setswitchinterval(switch_s)
    assert len(closed) == 1
    assert arenas_of_this_process() == arenas


def arenas_of_this_process() -> int:
    """The process's descriptors and mappings of unnamed files in /dev/shm."""
    links = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor that lists the directory
            links.append(str(link.readlink()))
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return sum(f"{SHM_DIRECTORY}/#" in line for line in (*links, *mapped))


def test_a_taken_port_leaves_nothing_behind(start: Callable[[int], None]) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(PortInUseError, match="is in use"),
    ):
        start(taken.getsockname()[1])


def test_no_memory_for_the_arena_leaves_nothing_behind(start, monkeypatch) -> None:
    def full(*_arguments: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(SharedMemoryError, match="asked for"):
        start(0)


def test_a_replaced_server_grants_no_slots() -> None:
    server = object.__new__(ExpertServer)
    server._table = SlotTable(Arena.create_local(2, 64, 64, 1))
    server._table.grant("a", 1, 2)
    server._on_replaced()
    assert server._table.clients() == set()


def test_a_new_process_of_a_client_frees_the_formers_slots() -> None:
    """13: a client dies holding slots ... The monitor lost its records meanwhile, and counts from 1."""
    server = object.__new__(ExpertServer)
    arena = Arena.create_local(2, 64, 64, 1)
    server._table, server._members = SlotTable(arena), {}
    server._state = MemberState.SERVING
    held = server._table.grant("a", 2, 2)
    assert held is not None
    for pid, incarnation, stays in [(1, 2, True), (2, 1, False)]:
        client = Member("a", Role.ATTENTION_CLIENT, pid, "h", "", MemberState.SERVING, incarnation)
        server._on_members(MembershipView(1, MappingProxyType({"a": client})))
        assert (server._table.get(held.connection_id) is not None) == stays
