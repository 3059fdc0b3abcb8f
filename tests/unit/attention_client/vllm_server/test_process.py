"""vLLM's processes, played by small programs: how they end, and what is said about it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from attention_client.vllm_server.process import VllmProcess, error_of
from waiting import eventually

ROOT = Path(__file__).parents[4]
# A server with a child that ignores SIGTERM and writes its pid; the second word says how the server ends.
SERVER = """
import os, signal, subprocess, sys, time
from multiprocessing import shared_memory
segment = shared_memory.SharedMemory(create=True, size=64, name=f"vllm-test-{os.getpid()}")
code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(300)"
child = subprocess.Popen([sys.executable, "-c", code])
open(sys.argv[1], "w").write(str(child.pid))
if sys.argv[2] == "fails":
    print("(EngineCore pid=1) ERROR 11-26 13:00:00 [core.py:1] ValueError: no memory", flush=True)
    print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
    sys.exit(3)
time.sleep(300)
"""


def lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def start(pid_file: Path, how: str) -> tuple[VllmProcess, int]:
    process = VllmProcess(["-c", SERVER, str(pid_file), how], os.environ)
    eventually(lambda: pid_file.is_file() and pid_file.read_text() != "")
    return process, int(pid_file.read_text())


@pytest.fixture(autouse=True)
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A private directory whose name is short, as the addresses of sockets need; and PYTHONPATH."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with tempfile.TemporaryDirectory() as short:
        monkeypatch.setenv("XDG_RUNTIME_DIR", short)
        yield Path(short) / "eaas"


def test_the_end_leaves_nothing(tmp_path: Path, runtime: Path) -> None:
    process, child = start(tmp_path / "pid", "serves")
    assert process.poll() is None
    began = time.monotonic()
    (sockets,) = runtime.iterdir()
    (sockets / "left").touch()
    process.end(5.0)
    assert process.poll() == -signal.SIGTERM
    assert not lives(child)
    assert not list(runtime.iterdir())
    assert not list(Path("/dev/shm").glob("vllm-test-*"))
    assert time.monotonic() - began < 8


def test_a_failed_server_leaves_no_child_and_says_why(tmp_path: Path) -> None:
    process, child = start(tmp_path / "pid", "fails")
    eventually(lambda: process.poll() is not None)
    assert process.poll() == 3
    process.end(1.0)
    assert process.why() == "ValueError: no memory"
    assert not lives(child)


def test_a_killed_parent_ends_the_server(runtime: Path) -> None:
    """SIGKILL of `eaas vllm`: the kernel tells vLLM's API server."""
    code = """
import os, time
from attention_client.vllm_server.process import VllmProcess
process = VllmProcess(["-c", "import time; time.sleep(300)"], os.environ)
print(process._process.pid, flush=True)
time.sleep(300)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        server = int(parent.stdout.readline())
        # The process asks the kernel before it becomes the server.
        eventually(lambda: b"time.sleep" in Path(f"/proc/{server}/cmdline").read_bytes())
        parent.kill()
    eventually(lambda: not lives(server))
    # The next one removes what is left.
    assert len(list(runtime.iterdir())) == 1
    VllmProcess(["-c", "pass"], os.environ).end(5.0)
    assert not list(runtime.iterdir())


@pytest.mark.parametrize(
    ("lines", "found"),
    [
        (
            ["(APIServer pid=7) eaas.errors.ClusterError: no monitor", "ValueError: later"],
            "no monitor",
        ),
        (["api_server.py: error: argument --port: invalid int"], "argument --port: invalid int"),
        (["(Worker pid=8) ERROR 11-26 13:00:00 [a.py:1] OSError: disk", ""], "OSError: disk"),
        (
            [
                "(APIServer pid=7) pydantic_core.ValidationError: 1 validation error for ModelConfig",
                "(APIServer pid=7)   Value error, max_model_len is too large [type=value_error, input]",
                "(APIServer pid=7)     For further information visit a page",
            ],
            "Value error, max_model_len is too large",
        ),
        (["INFO all is well", ""], "INFO all is well"),
        ([], "(nothing)"),
    ],
)
def test_the_cause_is_one_line(lines: list[str], found: str) -> None:
    assert error_of(lines) == found
