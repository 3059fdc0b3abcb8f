"""A forked process behaves like an executed one: how it looks, how it ends, and who ends with it."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from eaas.errors import ClusterError, EaasError
from eaas_cli.local import LocalCluster
from eaas_cli.local import fork_server_process as process
from eaas_cli.local.fork_server import CONTROL_MODULES, Forked, ForkServer
from eaas_cli.local.process import ChildProcess, lifeline, wait_ready
from refusals import refusal
from waiting import eventually

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SERVER = "expert-server-1"


@contextlib.contextmanager
def control_fork_server() -> Iterator[ForkServer]:
    """A fork server without torch, for monitors."""
    fork_server = ForkServer(CONTROL_MODULES)
    try:
        wait_ready([fork_server], 60)
        yield fork_server
    finally:
        fork_server.end()


@pytest.fixture(scope="module")
def bare() -> Iterator[ForkServer]:
    """One fork server for the tests that leave it intact."""
    with control_fork_server() as fork_server:
        yield fork_server


@pytest.fixture
def monitor(bare: ForkServer, tmp_path: Path) -> Iterator[ChildProcess]:
    child = ChildProcess("it's", ["monitor"], tmp_path, fork_server=bare)
    try:
        wait_ready([child], 60)
        yield child
    finally:
        child.signal(signal.SIGKILL)
        assert child.reap(30)


def field(pid: int, name: str) -> list[str]:
    """A line of /proc/PID/status."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return line.split()[1:]
    raise AssertionError(name)


def lives(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return field(pid, "State")[0] != "Z"
    return False


# -- how a process looks ------------------------------------------------------------------------------


def test_its_command_line_can_be_executed_again(monitor: ChildProcess) -> None:
    words = Path(f"/proc/{monitor.pid}/cmdline").read_bytes().split(b"\0")
    assert [word.decode() for word in words] == [sys.executable, "-m", "eaas_cli", "monitor", ""]
    shown = subprocess.run(
        ["ps", "-o", "args=", str(monitor.pid)], capture_output=True, text=True, check=True
    )
    assert shown.stdout.rstrip("\n") == f"{sys.executable} -m eaas_cli monitor"


def test_its_command_line_outlives_the_interpreter() -> None:
    """At its end Python frees what it has; the process is seen until it has left C's exit(), too."""
    code = """
import ctypes
from eaas_cli.local.fork_server_process import set_command_line
libc = ctypes.CDLL(None)
libc.__cxa_atexit(libc.pause, None, None)
libc.__cxa_atexit(libc.close, ctypes.c_void_p(1), None)  # called before the pause
set_command_line(["it", "lives" * 9])
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as ending:
        assert ending.stdout is not None
        ending.stdout.read()
        shown = Path(f"/proc/{ending.pid}/cmdline").read_bytes()
        ending.kill()
    assert shown == b"it\0" + b"lives" * 9 + b"\0"


def test_it_has_a_group_and_descriptors_of_its_own(
    bare: ForkServer, monitor: ChildProcess, tmp_path: Path
) -> None:
    assert os.getpgid(monitor.pid) == monitor.pid
    assert os.getpgid(bare.pid) == bare.pid
    assert monitor.address in (tmp_path / "it's.log").read_text()
    # No control socket, and no other child's pipes and logs: those would never be closed.
    second = ChildProcess("second", ["monitor"], tmp_path, fork_server=bare)
    try:
        wait_ready([second], 30)
        ours, its = (
            {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
            for pid in (bare.pid, second.pid)
        )
        # Every process has the pipe that closes when the launcher ends.
        alive = {os.readlink(f"/proc/self/fd/{lifeline(os.getpid())}")}
        assert alive <= ours & its
        shared = ours & its - alive
        assert not {name for name in shared if name.startswith(("socket:", "pipe:"))}
        assert not [name for name in its if "it's" in name]
        assert len([name for name in ours - alive if name.startswith("pipe:")]) <= 1  # its own
    finally:
        second.signal(signal.SIGKILL)
        assert second.reap(30)


def test_the_environment_is_the_launchers_of_this_moment(
    bare: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAAS_MONITOR__LEASE_S", "0.5")
    refused = ChildProcess("monitor", ["monitor"], None, fork_server=bare)
    assert "monitor.heartbeat_s" in refusal(refused)
    monkeypatch.delenv("EAAS_MONITOR__LEASE_S")
    child = ChildProcess("monitor", ["monitor"], None, fork_server=bare)
    wait_ready([child], 30)
    child.signal(signal.SIGTERM)
    assert child.reap(30)
    assert child.process.returncode == 0


def test_its_random_numbers_are_its_own() -> None:
    code = """
import json, os, random
import numpy as np
from eaas_cli.local import fork_server_process
for _ in range(2):
    if os.fork() == 0:
        os.environ["_EAAS_READY_FD"] = str(os.dup(1))
        asked = {"module": "x", "arguments": [], "environment": {}}
        fork_server_process.become(asked, os.dup(1), os.dup(1))
        print(json.dumps([random.random(), np.random.random()]), flush=True)
        os._exit(0)
    os.wait()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_a_process_that_needs_all_imports_may_come_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("early_import", "late_import"):
        (tmp_path / f"{name}.py").write_text("import time\ntime.sleep(0.5)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    fork_server = ForkServer(CONTROL_MODULES, ["early_import", "late_import"])
    try:
        wait_ready([fork_server], 60)
        # The fork server imports the first of them now.
        client = ChildProcess(
            "client", ["attention-client", "--help"], tmp_path, fork_server=fork_server
        )
        assert client.reap(30)
        assert client.process.returncode == 0
        monitor = ChildProcess("monitor", ["monitor"], tmp_path, fork_server=fork_server)
        wait_ready([monitor], 30)
        monitor.end()
        assert fork_server.running
    finally:
        fork_server.end()


# -- how a process ends -------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_signal_is_an_exit_code(monitor: ChildProcess, number: signal.Signals) -> None:
    assert monitor.running
    assert not monitor.reap(0.05)
    os.kill(monitor.pid, number)
    assert monitor.reap(30)
    assert not monitor.running
    assert monitor.process.returncode == -number
    # No signal is sent to a process that may have the number by now.
    monitor.signal(signal.SIGKILL)
    assert not lives(monitor.pid)


def test_a_killed_process_keeps_its_number_until_it_is_polled(monitor: ChildProcess) -> None:
    os.kill(monitor.pid, signal.SIGKILL)
    eventually(lambda: field(monitor.pid, "State")[0] == "Z")
    # Its first thread may end before its last one.
    eventually(lambda: not monitor.running)
    assert not Path(f"/proc/{monitor.pid}").exists()
    assert monitor.reap(0)


def test_a_cluster_whose_server_is_stopped_killed_and_started_again(
    checkpoint: Callable[..., Path], start_cluster: Callable[..., LocalCluster]
) -> None:
    cluster = start_cluster(checkpoint("qwen3_moe"), clients=0)
    child = cluster.children[SERVER]
    assert isinstance(child.process, Forked)
    child.signal(signal.SIGSTOP)
    eventually(lambda: field(child.pid, "State")[0] == "T")
    assert child.running
    child.signal(signal.SIGKILL)
    eventually(lambda: cluster.ended() == [child])
    # Each process starts its own torch pools and gRPC threads.
    cluster.restart(SERVER)
    again = cluster.children[SERVER]
    assert again.pid != child.pid
    assert again.process.returncode is None
    assert int(field(again.pid, "Threads")[0]) > 3
    pids = [c.pid for c in cluster.children.values()]
    cluster.stop()
    assert not any(map(lives, pids))
    # On a busy machine some may not end in time and are killed.
    assert {c.process.returncode for c in cluster.children.values()} <= {0, -signal.SIGKILL}


def test_a_server_that_was_seen_to_end_is_let_in_again_at_once(
    checkpoint: Callable[..., Path], start_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    file = tmp_path / "cluster.yaml"
    # A lease longer than the test, and longer than any registration is retried.
    file.write_text("monitor: {lease_s: 300, heartbeat_s: 0.5}\n")
    model = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model")
    cluster = start_cluster(model, clients=0, config_file=file)
    for _ in range(2):
        cluster.children[SERVER].signal(signal.SIGKILL)
        cluster.restart(SERVER)
    # The same if a process in between never registered.
    cluster.children[SERVER].signal(signal.SIGKILL)
    away = model.rename(tmp_path / "away")
    with pytest.raises(EaasError, match="model"):
        cluster.restart(SERVER)
    away.rename(model)
    cluster.restart(SERVER)
    # The name of a server that was given up can be used again, too.
    cluster.children[SERVER].signal(signal.SIGKILL)
    assert cluster.children[SERVER].reap(60)
    assert cluster.add_server().name == SERVER
    wait_ready([cluster.children[SERVER]], 60)


# -- processes that end together ----------------------------------------------------------------------

LAUNCHER = """
import json, sys, time
from pathlib import Path
from eaas_cli.local import LocalCluster
with LocalCluster(Path(sys.argv[1]), servers=1, redundancy=1, clients=0) as cluster:
    pids = {c.name: c.pid for c in cluster.children.values()} | {"fork_server": cluster.fork_server.pid}
    print(json.dumps(pids), flush=True)
    if sys.argv[2] == "waits":
        time.sleep(600)
    server = cluster.children["expert-server-0"]
    server.reap(60)
    ended = [[c.name, c.process.returncode] for c in cluster.ended()]
    cluster.restart("expert-server-0")
    print(json.dumps(ended), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def launch(checkpoint: Callable[..., Path]) -> Iterator[Callable[..., Any]]:
    """A launcher process with a cluster and its own fork server, and the pids of all its processes."""
    started: list[subprocess.Popen[str]] = []

    def start(way: str) -> tuple[subprocess.Popen[str], dict[str, int]]:
        launcher = subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, str(checkpoint("qwen3_moe")), way],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(launcher)
        assert launcher.stdout is not None
        return launcher, json.loads(launcher.stdout.readline())

    yield start
    for launcher in started:
        launcher.kill()
        launcher.communicate()


@pytest.mark.parametrize(
    "fork_server",
    [
        pytest.param("runs", marks=pytest.mark.nightly),
        pytest.param("is stopped", marks=pytest.mark.nightly),
        pytest.param("was killed", marks=pytest.mark.nightly),
        "is killed",
    ],
)
def test_nothing_outlives_a_launcher_that_is_killed(
    launch: Callable[..., Any], fork_server: str
) -> None:
    """The kernel's signal reaches every process, whatever the state of the fork server."""
    launcher, pids = launch("waits")
    assert field(pids["expert-server-0"], "PPid") == [str(pids["fork_server"])]
    if fork_server == "is stopped":
        os.kill(pids["fork_server"], signal.SIGSTOP)
    elif fork_server == "was killed":
        os.kill(pids["fork_server"], signal.SIGKILL)
        eventually(lambda: not lives(pids["fork_server"]))
        assert lives(pids["expert-server-0"])
    launcher.kill()
    if fork_server == "is killed":
        os.kill(pids["fork_server"], signal.SIGKILL)
    launcher.wait()
    if fork_server == "is stopped":
        eventually(lambda: not lives(pids["expert-server-0"]))
        os.kill(pids["fork_server"], signal.SIGCONT)
    eventually(lambda: not any(map(lives, pids.values())))


@pytest.mark.nightly
def test_servers_live_on_when_their_fork_server_is_killed(launch: Callable[..., Any]) -> None:
    """The launcher adopts them: it knows their exit codes, and starts another fork server when needed."""
    launcher, pids = launch("looks")
    os.kill(pids["fork_server"], signal.SIGKILL)
    eventually(lambda: not lives(pids["fork_server"]))
    server = pids["expert-server-0"]
    eventually(lambda: field(server, "PPid") == [str(launcher.pid)])
    time.sleep(0.2)
    assert all(lives(pid) for name, pid in pids.items() if name != "fork_server")
    os.kill(server, signal.SIGKILL)
    assert json.loads(launcher.stdout.readline()) == [["expert-server-0", -signal.SIGKILL]]
    assert not Path(f"/proc/{server}").exists()
    launcher.communicate("", timeout=60)
    assert launcher.returncode == 0
    assert not any(map(lives, pids.values()))


def test_a_fork_server_that_cannot_import_says_why() -> None:
    fork_server = ForkServer(("no_such_module",))
    try:
        with pytest.raises(ClusterError, match=r"fork-server ended .*no_such_module"):
            wait_ready([fork_server], 60)
    finally:
        fork_server.end()


def test_a_refused_fork_is_an_error_of_the_launcher(
    bare: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fork server and its children live on."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def answer() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fork", refuse)
            process.serve_one(theirs, [])

    with ours, theirs, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(bare, "control", ours)
        before = len(os.listdir("/proc/self/fd"))
        answered = pool.submit(answer)
        with pytest.raises(ClusterError, match="cannot fork: Resource temporarily unavailable"):
            ChildProcess("monitor", ["monitor"], None, fork_server=bare)
        answered.result()
        assert len(os.listdir("/proc/self/fd")) == before
        monkeypatch.undo()


def test_many_threads_may_start_processes(bare: ForkServer) -> None:
    """Each gets the answer to its own request."""

    def exit_code(number: int) -> int | None:
        child = ChildProcess(f"monitor-{number}", ["monitor", "--nonsense"], None, fork_server=bare)
        assert child.reap(60)
        return child.process.returncode

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(exit_code, range(16))) == {2}
    assert not select.select([bare.control], [], [], 0)[0]


def test_an_interrupted_request_leaves_no_answer_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between a request and its answer ends the fork server."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with control_fork_server() as fork_server:
        with monkeypatch.context() as patched:
            patched.setattr(socket, "recv_fds", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ChildProcess("monitor", ["monitor"], tmp_path, fork_server=fork_server)
        with pytest.raises(ClusterError, match="does not answer"):
            ChildProcess("monitor", ["monitor"], tmp_path, fork_server=fork_server)
        assert fork_server.reap(30)
