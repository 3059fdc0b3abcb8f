"""Loading experts: peak memory, and how long it delays the polling loop.

This file is also a program: child processes without pytest serve, or measure their own memory.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import json
import math
import select
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from eaas.checkpoint import Checkpoint
from eaas.wire import Arena, RequestHeader, ResultHeader, SlotState
from eaas.wire.header import Status, WireDtype, payload_layout, result_length
from eaas.wire.slot import DOORBELL, request_views
from eaas_cli.demo_model.architectures import DemoSizes, build_config
from expert_server.experts.store import ExpertStore
from expert_server.kernels.choose import KERNELS
from expert_server.kernels.kernel import KernelSpec
from expert_server.loop.loop import ServeLoop
from expert_server.main import _SWITCH_S
from expert_server.transports.slot_ownership import SlotTable
from expert_server.weights.reader import ExpertReader

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

TOKENS, TOP_K = 4, 2
# 150 MB.
EXPERTS = 48
# Garbage collection during the imports would take a third of a child's time.
WITHOUT_COLLECTOR = """
import gc, runpy, sys
gc.disable()
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def write_experts(path: Path, architecture: str, layers: int, experts: int, hidden: int) -> Path:
    """A bfloat16 checkpoint that holds only experts, in one file."""
    sizes = DemoSizes(architecture, layers, hidden, experts, TOP_K, 400, 0, "bfloat16")
    config = build_config(sizes)
    config.dtype = torch.bfloat16
    config.save_pretrained(path)
    intermediate = hidden // 2
    one = torch.randn(hidden * intermediate).div(math.sqrt(hidden)).bfloat16()

    def rows(*shape: int) -> torch.Tensor:
        return one.repeat(-(-math.prod(shape) // len(one)))[: math.prod(shape)].view(shape).clone()

    tensors = {}
    for layer in range(layers):
        name = f"model.layers.{layer}.mlp.experts"
        if architecture == "gpt_oss":
            tensors[f"{name}.gate_up_proj"] = rows(experts, hidden, 2 * intermediate)
            tensors[f"{name}.gate_up_proj_bias"] = rows(experts, 2 * intermediate)
            tensors[f"{name}.down_proj"] = rows(experts, intermediate, hidden)
            tensors[f"{name}.down_proj_bias"] = rows(experts, hidden)
        else:
            for expert in range(experts):
                tensors[f"{name}.{expert}.gate_proj.weight"] = rows(intermediate, hidden)
                tensors[f"{name}.{expert}.up_proj.weight"] = rows(intermediate, hidden)
                tensors[f"{name}.{expert}.down_proj.weight"] = rows(hidden, intermediate)
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def child(*arguments: object, **options: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WITHOUT_COLLECTOR, __file__, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, **options)


# -- memory ---------------------------------------------------------------------------------------


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3_moe", 1),
        pytest.param(("qwen3_moe", 3), marks=pytest.mark.nightly),
        pytest.param(("gpt_oss", 1), marks=pytest.mark.nightly),
    ],
)
def memory(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, float]]:
    """Load the experts (in one layer at worst); per kernel the memory it took."""
    architecture, layers = request.param
    path = tmp_path_factory.mktemp("memory")
    write_experts(path, architecture, layers, experts=EXPERTS // layers, hidden=1024)
    output, _ = child("memory", path).communicate()
    (path / "model.safetensors").unlink()
    found: dict[str, dict[str, float]] = json.loads(output)
    return found


@pytest.mark.parametrize("kernel", KERNELS)
def test_memory_while_loading(memory: dict[str, Any], kernel: str) -> None:
    packed = memory[kernel]["packed"]
    assert packed > 0.9 * EXPERTS * 3 * 1024 * 512 * 2
    assert memory[kernel]["peak"] < 1.3 * packed
    assert memory[kernel]["after"] < 1.1 * packed


def measure_memory(path: Path) -> None:
    """Child: print what each kernel's loading adds to the resident memory, mapped files included."""
    torch.set_num_threads(1)
    found = {}
    for name, kind in KERNELS.items():
        reader = ExpertReader(Checkpoint.open(path))
        kernel = kind(reader.forms, KernelSpec(reader.dtype))
        store = ExpertStore(reader, kernel)
        # Memory that malloc keeps from the last kernel must not hide what this one takes.
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")  # The peak begins anew.
        before = status_bytes("VmRSS")
        store.load({layer: range(reader.num_experts) for layer in range(len(reader.forms))})
        found[name] = {
            "packed": kernel.bytes,
            "peak": status_bytes("VmHWM") - before,
            "after": status_bytes("VmRSS") - before,
        }
        kernel.close()
    print(json.dumps(found))


def status_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


# -- the loop -------------------------------------------------------------------------------------


class Client:
    """Send sequential small requests to a serving child and time the answers."""

    def __init__(self, path: Path) -> None:
        self.process = child("serve", path, stdin=subprocess.PIPE)
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        self.commands, self.answers = self.process.stdin, self.process.stdout
        told = json.loads(self.answers.readline())
        self.hidden: int = told["hidden"]
        self.generation: int = told["generation"]
        self.arena = Arena.attach(self.process.pid, told["fd"], told["bytes"])

    def close(self) -> None:
        self.arena.close()
        self.process.communicate(b"\n")

    def ask(self, request_id: int) -> float:
        """Milliseconds to the answer, without the time in which a thread waited for a processor."""
        header = RequestHeader.of(
            dtype=WireDtype.BFLOAT16,
            generation=self.generation,
            request_id=request_id,
            epoch=1,
            budget_us=60_000_000,
            layer=0,
            batch_size=TOKENS,
            hidden_size=self.hidden,
            top_k=TOP_K,
        )
        offset = self.arena.request_offset(0)
        _, ids_TK, _ = request_views(self.arena.buffer, offset, header)
        ids_TK[...] = -1  # Measures the loop's time, not the kernel's.
        header.pack_into(self.arena.buffer, offset)
        queued_ms = self.queued_ms()
        started = time.perf_counter()
        assert self.arena.client_write_done(0)
        self.arena.flags.ring(DOORBELL)
        assert self.arena.flags.wait(0, 1, SlotState.DONE.mask, 1, -1, 0, 60_000_000)
        took_ms = (time.perf_counter() - started) * 1e3
        queued_ms = self.queued_ms() - queued_ms
        result = ResultHeader.unpack_from(self.arena.buffer, self.arena.result_offset(0))
        assert (result.status, result.request_id) == (Status.OK, request_id)
        assert self.arena.client_free(0)
        return took_ms - queued_ms

    def queued_ms(self) -> float:
        """How long the loop's thread and this one have waited for a processor, in total."""
        files = (Path(f"/proc/{self.process.pid}/schedstat"), Path("/proc/thread-self/schedstat"))
        return sum(int(file.read_text().split()[1]) for file in files) / 1e6

    def gaps_while_loading(self, layer: int, expert: int) -> list[float]:
        self.commands.write(f"{layer} {expert}\n".encode())
        self.commands.flush()
        gaps = []
        while not select.select([self.answers], [], [], 0)[0]:
            gaps.append(self.ask(len(gaps)))
        assert self.answers.readline() == b"loaded\n"
        return gaps


@pytest.mark.alone
@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs CONFIG_SCHED_INFO")
@pytest.mark.parametrize(
    ("layers", "experts", "hidden"),
    [pytest.param(1, 7, 4096, id="large"), pytest.param(40, 128, 64, id="many")],
)
def test_the_loop_is_not_kept_by_a_load(
    tmp_path: Path, layers: int, experts: int, hidden: int
) -> None:
    """Load one expert at a time during requests: of 50 MB, or one of many names (15,360 tensors).

    The bound is for the median over all loads of the longest gap in a load: now and then the system takes the
    processor from a thread that holds the interpreter lock.
    """
    client = Client(write_experts(tmp_path / "model", "qwen3_moe", layers, experts, hidden))
    try:
        usual = [max(client.ask(i) for i in range(100)) for _ in range(20)]
        gaps = [client.gaps_while_loading(0, expert) for expert in range(1, min(experts, 21))]
    finally:
        client.close()
    assert sum(map(len, gaps)) > 20, "the client asked hardly anything during the loads"
    longest = statistics.median(max(each, default=0.0) for each in gaps)
    assert longest < 5 + 2 * statistics.median(usual), (longest, usual)


def serve(path: Path) -> None:
    """Child: a loop in the main thread, as in an expert server; loads the experts named on its input."""
    torch.set_num_threads(1)
    sys.setswitchinterval(_SWITCH_S)
    checkpoint = Checkpoint.open(path)
    shape = checkpoint.shape
    reader = ExpertReader(checkpoint)
    kernel = KERNELS["reference"](reader.forms, KernelSpec(reader.dtype))
    store = ExpertStore(reader, kernel)
    store.load({0: [0]})
    payload = payload_layout(TOKENS, shape.hidden_size, TOP_K, WireDtype.FLOAT32).total
    arena = Arena.create_shared(1, payload, result_length(TOKENS, shape.hidden_size), 1)
    table = SlotTable(arena)
    grant = table.grant("client", 1, 1)
    assert grant is not None
    loop = ServeLoop(arena, table, kernel, shape, 50)

    def load() -> None:
        for line in iter(sys.stdin.readline, "\n"):
            layer, expert = map(int, line.split())
            store.load({layer: [expert]})
            print("loaded", flush=True)
        loop.stop()

    told = {"hidden": shape.hidden_size, "generation": grant.generation}
    print(json.dumps({**told, "fd": arena.fd, "bytes": arena.size}), flush=True)
    threading.Thread(target=load).start()
    loop.run()


if __name__ == "__main__":
    gc.enable()
    atexit.register(gc.freeze)
    {"memory": measure_memory, "serve": serve}[sys.argv[1]](Path(sys.argv[2]))
