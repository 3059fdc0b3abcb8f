"""`python -m benchmarks.dispatch`: a small run, and interrupted runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from benchmarks.dispatch import __main__ as dispatch
from benchmarks.dispatch.plan import Plan
from benchmarks.harness.lone_client import connected
from benchmarks.harness.lone_server import lone_server
from benchmarks.harness.worker import working
from eaas.cores import usable_cores
from eaas.errors import ClusterError
from eaas.wire.arena import SPIN_US
from eaas_cli.bench.experts.plan import Shape
from eaas_cli.local.fork_server import ForkServer
from fake_cuda import FakeCuda

two_cores = pytest.mark.skipif(usable_cores() < 2, reason="the floor has a core for each side")
pytestmark = [pytest.mark.integration, pytest.mark.timeout(300), two_cores]

ROOT = Path(__file__).parents[3]
TINY = Plan(
    transports=("shm", "grpc"),
    hidden=(64, 32),
    tokens=(1, 8),
    rounds=2,
    top_k=2,
    num_experts=4,
    turn_s=0.002,
    watch_s=0.02,
    layer=Shape(64, 32, 4, 2),
    layer_tokens=(4, 8),
)


def traces() -> Counter[str]:
    """Children, open shared memory and sockets, and mappings of this process."""
    found: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            name = os.readlink(f"/proc/self/fd/{fd}")
        except FileNotFoundError:
            continue  # The listing's own.
        if any(kind in name for kind in ("/dev/shm", "memfd", "socket")):
            found[name] += 1
    maps = Path("/proc/self/maps").read_text()
    for kind in ("/dev/shm/", "memfd:eaas"):
        found[kind] += maps.count(kind)
    found.update(str(child.pid) for child in psutil.Process().children(recursive=True))
    return found


@pytest.fixture(scope="module")
def document(fork_server: ForkServer) -> Iterator[dict[str, Any]]:
    """The document of a full run, which leaves nothing behind."""
    threads = torch.get_num_threads()
    lines: list[str] = []
    before = traces()
    found = dispatch.bench_dispatch(TINY, lines.append, with_server=True, fork_server=fork_server)
    deadline = time.monotonic() + 20
    while new := traces() - before:
        assert time.monotonic() < deadline, new
        time.sleep(0.05)  # gRPC closes a channel's sockets in its own time.
    assert any("grpc hidden 32 T=8" in line for line in lines)
    yield found
    torch.set_num_threads(threads)


def test_the_document(document: dict[str, Any]) -> None:
    assert document == json.loads(json.dumps(document))
    assert document["skipped"] == []
    cells = [(row["transport"], row["hidden"], row["tokens"]) for row in document["rows"]]
    assert cells == [
        (transport, hidden, tokens)
        for hidden in TINY.hidden
        for transport in TINY.transports
        for tokens in TINY.tokens
    ]
    for row in document["rows"]:
        for key in ("floor_us", "layer_call_us"):
            assert 0 < row[key]["p50"] <= row[key]["p99"]
        assert row["rounds"] == TINY.rounds
        assert row["calls"] >= 2 * 20
        assert row["result_bytes"] == 64 + 4 * row["tokens"] * row["hidden"]
        assert {"over_floor_us", "times_floor", "request_bytes"} < row.keys()
    server = document["server"]
    assert server["idle_cpu_fraction"] >= 0
    assert server["busy_cpu_fraction"] > 0
    assert [real["tokens"] for real in document["layer"]] == [4, 8]
    for real in document["layer"]:
        assert real["kernel"].startswith(("native", "reference"))
        assert real["calls"] == 2 * 5
        assert min(real["in_process_ms"], real["through_server_ms"], real["ratio"]) > 0
    assert document["machine"]["cores"] == usable_cores()
    assert document["settings"]["spin_us"] == SPIN_US


def test_a_refused_connection_is_one_line(fork_server: ForkServer) -> None:
    shape = TINY.shape(32)
    with working([lone_server(shape, tokens=8, slots=2)], fork_server) as (server,):
        refused = pytest.raises(ClusterError, match=r"shm: no connection: .*3 slots")
        with refused, connected(server.address, "shm", shape, slots=3):
            pass


def test_layer_calls_for_tensors_on_a_device(
    monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer
) -> None:
    """On a fake one: it counts that the host never waits for all of the device."""
    monkeypatch.setattr(dispatch, "find_gpu", lambda: torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Fake")
    plan = Plan(("shm",), (64,), (1, 600), 1, top_k=2, num_experts=4, turn_s=0.001)
    threads = torch.get_num_threads()
    with FakeCuda() as cuda:
        document = dispatch.bench_dispatch(
            plan, lambda _line: None, with_server=False, on_gpu=True, fork_server=fork_server
        )
    torch.set_num_threads(threads)
    assert document["machine"]["device"] == "Fake"
    for row in document["rows"]:
        assert 0 < row["device_call_us"]["p50"] <= row["device_call_us"]["p99"]
    assert cuda.copies > 0
    assert cuda.waits["event"] > 0
    assert not cuda.waits["device"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_of_a_run_that_is_cut_short(number: signal.Signals) -> None:
    words = ["--no-server", "--hidden", "64", "--tokens", "1", "--rounds", "1000000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.dispatch", *words],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "1000000 rounds" in line:
                break
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 2  # the fork server and a server
        process.send_signal(number)
        process.communicate(timeout=30)
        assert process.returncode != 0
        _, alive = psutil.wait_procs(children, timeout=20)
        assert alive == []
    finally:
        process.kill()
        process.wait()
