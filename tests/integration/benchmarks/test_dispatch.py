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

from benchmarks.dispatch import Plan, caller, layer, run
from benchmarks.dispatch.plot import draw_plot
from benchmarks.dispatch.report import print_report
from benchmarks.dispatch.server import null_server
from eaas.cores import usable_cores
from eaas.errors import ClusterError
from eaas.wire.arena import SPIN_US
from eaas_cli.bench.experts.plan import Shape
from eaas_cli.bench.worker import working
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
    with_server=True,
    top_k=2,
    num_experts=4,
    turn_s=0.002,
    watch_s=0.02,
    layer=Shape(64, 32, 4, 2),
    layer_tokens=(4, 8),
    sleep_us=100,
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
    found = run.bench_dispatch(TINY, lines.append, fork_server)
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
        for key in ("exchange_us", "floor_us", "layer_call_us"):
            assert 0 < row[key]["p50"] <= row[key]["p99"]
        assert row["client_us"] > 0
        assert row["rounds"] == TINY.rounds
        assert row["calls"] >= 2 * 20
        assert row["result_bytes"] == 64 + 4 * row["tokens"] * row["hidden"]
        assert {"over_floor_us", "times_floor", "request_bytes"} < row.keys()
    server, joint = document["server"], document["servers"]
    assert server["idle_cpu_fraction"] >= 0
    assert server["busy_cpu_fraction"] > 0
    assert [real["tokens"] for real in document["layer"]] == [4, 8]
    for real in document["layer"]:
        assert real["kernel"].startswith(("native", "reference"))
        assert real["calls"] == 2 * layer._CALLS
        assert min(real["in_process_ms"], real["through_server_ms"], real["ratio"]) > 0
    assert min(joint["one_us"], joint["all_us"]) > 100
    assert 0 < joint["ratio"] < 2
    assert document["machine"]["cores"] == usable_cores()
    assert document["settings"]["server_spin_us"] == SPIN_US


def test_the_table(document: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    skipped = [{"what": "grpc hidden 7168 T=4096", "reason": "a slot takes 2340 tokens"}]
    machine = document["machine"] | {"busy_cores_elsewhere": 0.5}
    print_report(document | {"skipped": skipped, "machine": machine})
    printed = capsys.readouterr().out
    for words in (
        "shm, hidden 64",
        "grpc, hidden 32",
        "% of a core idle",
        "ms through a server",
        "skipped: grpc hidden 7168 T=4096: a slot takes 2340 tokens",
        "Other processes kept 0.5 cores busy",
    ):
        assert words in printed
    assert "…" not in printed
    cells_only = {key: document[key] for key in ("settings", "rows", "skipped")}
    print_report(cells_only | {"machine": machine})
    assert "of a core idle" not in capsys.readouterr().out


def test_the_plot(document: dict[str, Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw_plot(document, tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules


def test_a_refused_connection_is_one_line(fork_server: ForkServer) -> None:
    with working([null_server(TINY, 32, 8, 2)], fork_server) as (server,):
        assert server.address is not None
        sizes = {"hidden": 32, "num_experts": 4, "top_k": 2, "name": "client"}
        with pytest.raises(ClusterError, match=r"pigeon: no connection: transport 'pigeon'; this"):
            caller.Caller(server.address, "pigeon", slots=2, **sizes)
        with pytest.raises(ClusterError, match=r"shm: no connection: .*3 slots"):
            caller.Caller(server.address, "shm", slots=3, **sizes)


def test_a_batch_larger_than_a_slot_is_skipped(
    monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer
) -> None:
    monkeypatch.setattr(caller.Caller, "capacity", lambda _self, _top_k: 4)
    skipped: list[dict[str, str]] = []
    plan = Plan(("shm",), (32,), (1, 8), 1, False, top_k=2, num_experts=4, turn_s=0.001)
    rows = run._rows(plan, lambda _line: None, skipped, fork_server)
    assert [row["tokens"] for row in rows] == [1]
    reason = "a slot takes 4 tokens over this transport"
    assert skipped == [{"what": "shm hidden 32 T=8", "reason": reason}]


def test_layer_calls_for_tensors_on_a_device(
    monkeypatch: pytest.MonkeyPatch, fork_server: ForkServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a fake one: it counts that the host never waits for all of the device."""
    monkeypatch.setattr(run, "find_gpu", lambda: torch.device("cuda:0"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Fake")
    plan = Plan(("shm",), (64,), (1, 600), 1, False, "cuda", top_k=2, num_experts=4, turn_s=0.001)
    threads = torch.get_num_threads()
    with FakeCuda() as cuda:
        document = run.bench_dispatch(plan, lambda _line: None, fork_server)
    torch.set_num_threads(threads)
    assert document["machine"]["device"] == "Fake"
    for row in document["rows"]:
        assert 0 < row["device_call_us"]["p50"] <= row["device_call_us"]["p99"]
    assert cuda.copies > 0
    assert cuda.waits["event"] > 0
    assert not cuda.waits["device"]
    print_report(document)
    printed = capsys.readouterr().out
    assert "device: a layer call for tensors on the GPU" in printed
    assert "…" not in printed


def test_the_command_prints_one_document(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    small = [
        "--no-server",
        "--transport",
        "shm",
        "--hidden",
        "64",
        "--tokens",
        "1",
        "--rounds",
        "1",
    ]
    words = [*small, "--json", "--plot", str(tmp_path / "x.png")]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.dispatch", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [row["transport"] for row in document["rows"]] == ["shm"]
    assert document.keys() == {"machine", "settings", "rows", "skipped"}
    assert (tmp_path / "x.png").is_file()
    assert "shm hidden 64 T=1: 1 rounds" in done.stderr


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
        assert len(children) == 3  # the floor's other process, the fork server and a server
        process.send_signal(number)
        process.communicate(timeout=30)
        assert process.returncode != 0
        _, alive = psutil.wait_procs(children, timeout=20)
        assert alive == []
    finally:
        process.kill()
        process.wait()
