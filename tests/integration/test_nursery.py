"""A process that is forked behaves like one that is executed, to whoever starts, looks at or kills it."""

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
from eaas.local import LocalCluster
from eaas.local import nursery_process as process
from eaas.local.child import READY_VARIABLE
from eaas.local.nursery import CONTROL_MODULES, Forked, Nursery
from eaas.local.process import ChildProcess, _lifeline, wait_ready

pytestmark = [pytest.mark.integration, pytest.mark.timeout(120)]

SERVER = "expert-server-1"


@pytest.fixture
def bare() -> Iterator[Nursery]:
    """One without torch: its children are monitors."""
    nursery = Nursery(CONTROL_MODULES)
    try:
        wait_ready([nursery], 60)
        yield nursery
    finally:
        nursery.end()


@pytest.fixture
def monitor(bare: Nursery, tmp_path: Path) -> Iterator[ChildProcess]:
    child = ChildProcess("it's", ["monitor"], tmp_path, nursery=bare)
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


def until(wanted: Callable[[], Any], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not wanted():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# -- what is seen of a process -------------------------------------------------------------------------


def test_its_command_line_can_be_executed_again(monitor: ChildProcess) -> None:
    words = Path(f"/proc/{monitor.pid}/cmdline").read_bytes().split(b"\0")
    assert [word.decode() for word in words] == [sys.executable, "-m", "eaas", "monitor", ""]
    shown = subprocess.run(
        ["ps", "-o", "args=", str(monitor.pid)], capture_output=True, text=True, check=True
    )
    assert shown.stdout.rstrip("\n") == f"{sys.executable} -m eaas monitor"


def test_its_command_line_outlives_the_interpreter() -> None:
    """At its end Python frees what it has; the process is seen until it has left C's exit(), too."""
    code = """
import ctypes
from eaas.local.command_line import set_command_line
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
    bare: Nursery, monitor: ChildProcess, tmp_path: Path
) -> None:
    assert os.getpgid(monitor.pid) == monitor.pid
    assert os.getpgid(bare.pid) == bare.pid
    assert monitor.address in (tmp_path / "it's.log").read_text()
    # Neither the line to the launcher nor another child's pipes and logs: those would never be closed.
    second = ChildProcess("second", ["monitor"], tmp_path, nursery=bare)
    try:
        wait_ready([second], 30)
        ours, its = (
            {os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()}
            for pid in (bare.pid, second.pid)
        )
        # All have the line that ends with the launcher.
        lifeline = {os.readlink(f"/proc/self/fd/{_lifeline(os.getpid())}")}
        assert lifeline <= ours & its
        shared = ours & its - lifeline
        assert not {name for name in shared if name.startswith(("socket:", "pipe:"))}
        assert not [name for name in its if "it's" in name]
        assert len([name for name in ours - lifeline if name.startswith("pipe:")]) <= 1  # its own
    finally:
        second.signal(signal.SIGKILL)
        assert second.reap(30)


def test_the_environment_is_the_launchers_of_this_moment(
    bare: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EAAS_MONITOR__LEASE_S", "0.5")
    refused = ChildProcess("monitor", ["monitor"], None, nursery=bare)
    # Its own words, and an exit code.
    with pytest.raises(EaasError, match=r"monitor\.heartbeat_s"):
        wait_ready([refused], 30)
    assert refused.reap(30)
    assert refused.process.returncode == 2
    monkeypatch.delenv("EAAS_MONITOR__LEASE_S")
    child = ChildProcess("monitor", ["monitor"], None, nursery=bare)
    wait_ready([child], 30)
    child.signal(signal.SIGTERM)
    assert child.reap(30)
    assert child.process.returncode == 0


def test_its_random_numbers_are_its_own() -> None:
    code = """
import json, os, random
import numpy as np
from eaas.local import nursery_process
for _ in range(2):
    if os.fork() == 0:
        os.environ["_EAAS_READY_FD"] = str(os.dup(1))
        asked = {"module": "x", "arguments": [], "environment": {}}
        nursery_process._become(asked, os.dup(1), os.dup(1))
        print(json.dumps([random.random(), np.random.random()]), flush=True)
        os._exit(0)
    os.wait()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    first, second = map(json.loads, done.stdout.splitlines())
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_a_kernel_that_refuses_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is executed, then: slower, and seen by the same name."""

    class Executed(Exception):
        pass

    def refuse(_words: object) -> None:
        raise PermissionError

    def execute(path: str, words: list[str]) -> None:
        assert os.get_inheritable(ready_fd)
        raise Executed(path, words)

    for name in ("setpgid", "dup2"):
        monkeypatch.setattr(os, name, lambda *_: None)
    monkeypatch.setattr(os, "environ", {READY_VARIABLE: str(os.open(os.devnull, os.O_RDONLY))})
    monkeypatch.setattr(process, "set_command_line", refuse)
    monkeypatch.setattr(os, "execv", execute)
    ready_fd, log_fd = os.pipe()
    asked = {"module": "eaas", "arguments": ["monitor"], "environment": {}}
    try:
        with pytest.raises(Executed) as caught:
            process._become(asked, log_fd, ready_fd)
    finally:
        os.close(ready_fd)
    words = [sys.executable, "-m", "eaas", "monitor"]
    assert caught.value.args == (sys.executable, words)


# -- what is done to it --------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGABRT])
def test_a_signal_is_an_exit_code(bare: Nursery, number: signal.Signals) -> None:
    child = ChildProcess("monitor", ["monitor"], None, nursery=bare)
    wait_ready([child], 30)
    assert child.running
    assert not child.reap(0.05)
    os.kill(child.pid, number)
    assert child.reap(30)
    assert not child.running
    assert child.process.returncode == -number
    # Nothing is sent to whoever has the number now.
    child.signal(signal.SIGKILL)
    assert not lives(child.pid)


def test_a_killed_one_keeps_its_number_until_it_is_looked_at(bare: Nursery) -> None:
    child = ChildProcess("monitor", ["monitor"], None, nursery=bare)
    wait_ready([child], 30)
    os.kill(child.pid, signal.SIGKILL)
    until(lambda: field(child.pid, "State")[0] == "Z")
    # The first of its threads may be gone before the last.
    until(lambda: not child.running)
    assert not Path(f"/proc/{child.pid}").exists()
    assert child.reap(0)


def test_a_cluster_whose_server_is_stopped_killed_and_started_again(
    checkpoint: Callable[..., Path], start_cluster: Callable[..., LocalCluster]
) -> None:
    cluster = start_cluster(checkpoint("qwen3_moe"), attention_client=False)
    child = cluster.children[SERVER]
    assert isinstance(child.process, Forked)
    child.signal(signal.SIGSTOP)
    until(lambda: field(child.pid, "State")[0] == "T")
    assert child.running
    child.signal(signal.SIGKILL)
    until(lambda: cluster.ended() == [child])
    # Torch's pools and gRPC's threads start anew in each process.
    cluster.restart(SERVER)
    again = cluster.children[SERVER]
    assert again.pid != child.pid
    assert again.process.returncode is None
    assert int(field(again.pid, "Threads")[0]) > 3
    pids = [c.pid for c in cluster.children.values()]
    cluster.stop()
    assert not any(map(lives, pids))
    # Those that a busy machine does not let end in time are killed.
    assert {c.process.returncode for c in cluster.children.values()} <= {0, -signal.SIGKILL}


def test_a_server_that_was_seen_to_end_is_let_in_again_at_once(
    checkpoint: Callable[..., Path], start_cluster: Callable[..., LocalCluster], tmp_path: Path
) -> None:
    file = tmp_path / "cluster.yaml"
    # Nobody is silent for so long, and nobody tries to register for so long.
    file.write_text("monitor: {lease_s: 300, heartbeat_s: 0.5}\n")
    model = shutil.copytree(checkpoint("qwen3_moe"), tmp_path / "model")
    cluster = start_cluster(model, attention_client=False, config_file=file)
    for _ in range(2):
        cluster.children[SERVER].signal(signal.SIGKILL)
        cluster.restart(SERVER)
    # Be it that another one came between them, of which the monitor has not heard.
    cluster.children[SERVER].signal(signal.SIGKILL)
    away = model.rename(tmp_path / "away")
    with pytest.raises(EaasError, match="model"):
        cluster.restart(SERVER)
    away.rename(model)
    cluster.restart(SERVER)
    # And so it is with the name of one that was let go of.
    cluster.children[SERVER].signal(signal.SIGKILL)
    assert cluster.children[SERVER].reap(60)
    assert cluster.add_server().name == SERVER
    wait_ready([cluster.children[SERVER]], 60)


# -- who ends with whom --------------------------------------------------------------------------------

LAUNCHER = """
import json, sys, time
from pathlib import Path
from eaas.local import LocalCluster
with LocalCluster(Path(sys.argv[1]), servers=1, redundancy=1, attention_client=False) as cluster:
    pids = {c.name: c.pid for c in cluster.children.values()} | {"nursery": cluster._nursery.pid}
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
    """A launcher with a cluster that has a nursery of its own, and the pids of all that it started."""
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


@pytest.mark.parametrize("nursery", ["runs", "is stopped", "was killed", "is killed"])
def test_nothing_outlives_a_launcher_that_is_killed(
    launch: Callable[..., Any], nursery: str
) -> None:
    """The kernel's signal reaches each process, whatever has become of the fork server."""
    launcher, pids = launch("waits")
    assert field(pids["expert-server-0"], "PPid") == [str(pids["nursery"])]
    if nursery == "is stopped":
        os.kill(pids["nursery"], signal.SIGSTOP)
    elif nursery == "was killed":
        os.kill(pids["nursery"], signal.SIGKILL)
        until(lambda: not lives(pids["nursery"]))
        assert lives(pids["expert-server-0"])
    launcher.kill()
    if nursery == "is killed":
        os.kill(pids["nursery"], signal.SIGKILL)
    launcher.wait()
    if nursery == "is stopped":
        until(lambda: not lives(pids["expert-server-0"]))
        os.kill(pids["nursery"], signal.SIGCONT)
    until(lambda: not any(map(lives, pids.values())))


def test_servers_live_on_when_their_nursery_is_killed(launch: Callable[..., Any]) -> None:
    """The launcher adopts them: it knows their exit codes, and starts another nursery when it needs one."""
    launcher, pids = launch("looks")
    os.kill(pids["nursery"], signal.SIGKILL)
    until(lambda: not lives(pids["nursery"]))
    server = pids["expert-server-0"]
    until(lambda: field(server, "PPid") == [str(launcher.pid)])
    time.sleep(0.2)
    assert all(lives(pid) for name, pid in pids.items() if name != "nursery")
    os.kill(server, signal.SIGKILL)
    assert json.loads(launcher.stdout.readline()) == [["expert-server-0", -signal.SIGKILL]]
    assert not Path(f"/proc/{server}").exists()
    launcher.communicate("", timeout=60)
    assert launcher.returncode == 0
    assert not any(map(lives, pids.values()))


def test_a_nursery_that_cannot_import_says_why() -> None:
    nursery = Nursery(("no_such_module",))
    try:
        with pytest.raises(ClusterError, match=r"fork-server ended .*no_such_module"):
            wait_ready([nursery], 60)
    finally:
        nursery.end()


def test_a_system_that_lets_nobody_fork_is_an_answer(
    bare: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The nursery, and with it its children, lives on."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def refuse() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def answer() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fork", refuse)
            process._serve(theirs)

    with ours, theirs, ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(bare, "_control", ours)
        before = len(os.listdir("/proc/self/fd"))
        answered = pool.submit(answer)
        with pytest.raises(ClusterError, match="cannot fork: Resource temporarily unavailable"):
            ChildProcess("monitor", ["monitor"], None, nursery=bare)
        answered.result()
        assert len(os.listdir("/proc/self/fd")) == before
        monkeypatch.undo()


def test_many_threads_may_look(bare: Nursery) -> None:
    """Each gets the answer to its own request."""

    def life(number: int) -> int | None:
        child = ChildProcess(f"monitor-{number}", ["monitor", "--nonsense"], None, nursery=bare)
        assert child.reap(60)
        return child.process.returncode

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(life, range(16))) == {2}
    assert not select.select([bare._control], [], [], 0)[0]


def test_an_interrupted_request_leaves_no_answer_for_the_next(
    bare: Nursery, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between a request and its answer: the nursery ends, and what is stopped then is stopped."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(socket, "recv_fds", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ChildProcess("monitor", ["monitor"], tmp_path, nursery=bare)
    with pytest.raises(ClusterError, match="does not answer"):
        ChildProcess("monitor", ["monitor"], tmp_path, nursery=bare)
    assert bare.reap(30)
