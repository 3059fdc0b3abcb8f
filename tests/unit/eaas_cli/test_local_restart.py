"""Restarts of a local cluster's processes, by the launcher and by hand."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from eaas.errors import ClusterError
from eaas_cli.local import LocalCluster, cluster
from eaas_cli.local.by_hand import find_started_by_hand
from eaas_cli.local.process import program, wait_ready
from eaas_cli.local.restart import keep_port, restart_line
from eaas_cli.local.supervision import Supervisor
from hand_clock import HandClock
from waiting import eventually


def test_a_restart_keeps_the_port() -> None:
    arguments = ("monitor", "--host", "::1", "--port", "0", "--insecure")
    kept = keep_port(arguments, "[::1]:4711")
    assert kept == ("monitor", "--host", "::1", "--port", "4711", "--insecure")


def test_a_restart_line_has_the_environments_settings(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Settings of this role only, and no key."""
    monkeypatch.setenv("EAAS_MONITOR__LEASE_S", "3")
    monkeypatch.setenv("eaas_telemetry", '{"traces": true}')
    monkeypatch.setenv("EAAS_BALANCER__STEP_S", "2")
    monkeypatch.setenv("EAAS_API_KEY", "secret")
    words = shlex.split(restart_line(("monitor", "--port", "1")))
    assert words[0] == "env"
    assert set(words[1:3]) == {"EAAS_MONITOR__LEASE_S=3", 'eaas_telemetry={"traces": true}'}
    assert tuple(words[3:]) == (*program(), "monitor", "--port", "1")


def test_a_process_started_by_hand_has_the_same_arguments(tmp_path: Path) -> None:
    script = tmp_path / "eaas"
    script.write_text("import time\ntime.sleep(60)\n")
    arguments = ("expert-server", "--id", "it's", "--join", "127.0.0.1:1")
    with subprocess.Popen([sys.executable, str(script), *arguments]) as process:
        try:
            # The kernel reports the start before the program's words can be read.
            found = eventually(lambda: find_started_by_hand("a", arguments))
            assert found is not None
            assert find_started_by_hand("a", arguments[:3]) is None
            assert find_started_by_hand("a", (*arguments, "--threads", "1")) is None
            assert find_started_by_hand("a", ("expert-server", *arguments)) is None
            assert (found.pid, found.running) == (process.pid, True)
            assert not found.reap(0)
            found.signal(signal.SIGKILL)
            assert found.reap(10)
            assert not found.running
        finally:
            process.kill()
    assert find_started_by_hand("a", arguments) is None


class _Process:
    """A child that is ready or has failed."""

    def __init__(self, name: str, code: int | None) -> None:
        self.name, self.pid, self.process = name, 1, SimpleNamespace(returncode=code)
        self.arguments = (name,)
        self.running = code is None
        self.address: str | None = "somewhere" if code is None else None

    def read(self) -> None:
        pass

    def last_words(self) -> str:
        return "no room"


class _Cluster:
    """A cluster whose client fails again and again."""

    def __init__(self) -> None:
        self.fork_server = _Process("fork-server", None)
        self.children: dict[str, Any] = {
            name: _Process(name, None) for name in ("attention-client-0", "frontend", "monitor")
        }
        self.starts = 0

    def fail(self) -> None:
        self.children["attention-client-0"] = _Process("attention-client-0", 2)

    def find_started_by_hand(self) -> list[Any]:
        return []

    def ended(self) -> list[Any]:
        return [c for c in self.children.values() if not c.running]

    def start_fork_server(self) -> None:
        self.fork_server = _Process("fork-server", None)

    def start_again(self, name: str) -> None:
        self.starts += 1
        self.children[name] = _Process(name, 2)


def test_a_failed_start_ignores_other_clusters_monitors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Before its port is known, a monitor has the same arguments as those of other clusters."""
    monkeypatch.setattr(
        cluster, "precheck", lambda _model, **_: SimpleNamespace(tensors={}, matrices={})
    )
    asked: list[str] = []
    monkeypatch.setattr(
        cluster, "find_started_by_hand", lambda name, _arguments: asked.append(name)
    )
    local = LocalCluster(tmp_path, clients=0)
    local.children["monitor"] = SimpleNamespace(name="monitor", arguments=(), running=False)  # type: ignore[assignment]
    assert local.find_started_by_hand() == []
    assert asked == []
    local.monitor_address = "127.0.0.1:1"
    assert local.find_started_by_hand() == []
    assert asked == ["monitor"]


def test_a_client_that_fails_again_and_again_ends_the_cluster() -> None:
    clock, cluster = HandClock(100.0), _Cluster()
    supervisor = Supervisor(cluster, clock)  # type: ignore[arg-type]
    assert supervisor.step() == []
    cluster.fail()
    (line,) = supervisor.step()
    assert line == (
        "attention-client-0 (pid 1) ended with code 2; its requests go on with another one, or once it "
        "serves again; it starts again now"
    )
    started_s = [clock.now]
    while cluster.starts < 5:
        clock.now += 0.5
        before = cluster.starts
        supervisor.step()
        started_s += [clock.now] * (cluster.starts - before)
    # Half a second until its end is seen, and a growing pause.
    assert [b - a for a, b in pairwise(started_s)] == [1.0, 1.5, 2.5, 4.5]
    with pytest.raises(ClusterError, match=r"again and again; its last words: no room"):
        supervisor.step()


def test_a_served_time_resets_the_failures() -> None:
    clock, cluster = HandClock(100.0), _Cluster()
    supervisor = Supervisor(cluster, clock)  # type: ignore[arg-type]
    for _ in range(7):
        cluster.fail()
        (line,) = supervisor.step()
        assert line.endswith("starts again now")
        cluster.children["attention-client-0"] = _Process("attention-client-0", None)
        supervisor.step()
        clock.now += 3600


def test_a_client_waits_for_the_fork_server() -> None:
    cluster = _Cluster()
    supervisor = Supervisor(cluster)  # type: ignore[arg-type]
    cluster.fail()
    cluster.fork_server = _Process("fork-server", -9)
    (line,) = supervisor.step()
    assert "fork-server (pid 1) was ended by SIGKILL; the processes that it forked continue" in line
    assert (supervisor.can_start, cluster.starts) == (False, 0)
    assert supervisor.step()[0] == "fork-server (pid 1) serves again"
    assert cluster.starts == 1


def test_a_client_waits_for_the_monitor() -> None:
    """A missing monitor does not count as a failure of the client."""
    cluster = _Cluster()
    supervisor = Supervisor(cluster)  # type: ignore[arg-type]
    cluster.fail()
    cluster.children["monitor"] = _Process("monitor", -9)
    first, second = supervisor.step()
    assert first.endswith("it starts again once the monitor runs")
    assert second.endswith(f"ended; start it again with:\n  {restart_line(('monitor',))}\n")
    assert supervisor.step() == []
    cluster.children["monitor"] = _Process("monitor", None)
    supervisor.step()
    assert cluster.starts == 1


@pytest.mark.parametrize("needed", [False, True])
def test_a_start_ends_when_a_needed_process_has_ended(needed: bool) -> None:
    ours, theirs = os.pipe()
    try:
        starting: Any = _Process("attention-client-0", None)
        starting.address, starting.fd = None, ours
        ended: Any = _Process("balancer", -9)
        ended.address = "somewhere"
        both = ([starting], [ended]) if needed else ([starting, ended], [])
        with pytest.raises(ClusterError, match="balancer was ended by SIGKILL while others were"):
            wait_ready(both[0], 60.0, needed=both[1])
    finally:
        os.close(ours)
        os.close(theirs)
