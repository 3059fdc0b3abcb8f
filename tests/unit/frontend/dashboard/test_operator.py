"""Buttons reach processes of the same launcher only."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from eaas.cluster_snapshot import ClusterSnapshot
from eaas.cluster_snapshot.model import MemberSnapshot
from eaas.errors import ClusterError
from eaas.launcher_pipe import LAUNCHER_VARIABLE
from eaas.types import Member, MemberState, Role
from frontend.dashboard.operator import Operator, paused
from waiting import eventually

SLEEP = (sys.executable, "-c", "import time; time.sleep(100)")
SERVER, HERE = Role.EXPERT_SERVER, socket.gethostname()


def member(pid: int, role: Role = SERVER, host: str = HERE, name: str = "s") -> Member:
    return Member(name, role, pid, host, "", MemberState.SERVING)


@pytest.fixture
def lifeline(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A launcher pipe, as all processes of a launcher have it."""
    ours, theirs = os.pipe()
    monkeypatch.setenv(LAUNCHER_VARIABLE, str(ours))
    yield ours
    os.close(ours)
    os.close(theirs)


@pytest.fixture
def child(lifeline: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that the launcher did not start."""
    with subprocess.Popen(SLEEP) as process:
        yield process
        process.kill()


@pytest.fixture
def sibling(lifeline: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that the launcher started."""
    with subprocess.Popen((*SLEEP, "--id", "s"), pass_fds=(lifeline,)) as process:
        # The kernel reports the start before the program's words can be read.
        eventually(Path(f"/proc/{process.pid}/cmdline").read_bytes)
        yield process
        process.kill()


def snapshot(server: Member) -> ClusterSnapshot:
    return ClusterSnapshot(members=(MemberSnapshot(server, 0.1),))


def act(verb: str, server: Member, incarnation: int = 0) -> str:
    order = {"action": verb, "member": server.id, "incarnation": incarnation}
    return Operator().act(snapshot(server), order)


def test_pause_resume_kill(sibling: subprocess.Popen[bytes]) -> None:
    server = member(sibling.pid)
    assert "is paused" in act("pause", server)
    os.waitid(os.P_PID, sibling.pid, os.WSTOPPED | os.WNOWAIT)
    assert paused(snapshot(server)) == ["s"]
    assert "is resumed" in act("resume", server)
    os.waitid(os.P_PID, sibling.pid, os.WCONTINUED | os.WNOWAIT)
    assert paused(snapshot(server)) == []
    assert "was killed" in act("kill", server)
    assert sibling.wait(10) == -signal.SIGKILL
    with pytest.raises(ClusterError, match="No such process"):
        act("kill", server)


def test_an_engine_is_killed_and_other_attention_clients_are_not(
    sibling: subprocess.Popen[bytes],
) -> None:
    client = member(sibling.pid, Role.ATTENTION_CLIENT)
    with pytest.raises(ClusterError, match="not a live expert server or engine"):
        act("kill", client)
    assert sibling.poll() is None
    assert "was killed" in act("kill", replace(client, engine_address="h:1"))
    assert sibling.wait(10) == -signal.SIGKILL


def test_another_incarnation_gets_no_signal(sibling: subprocess.Popen[bytes]) -> None:
    with pytest.raises(ClusterError, match="s is gone or has restarted"):
        act("kill", member(sibling.pid), incarnation=1)
    with pytest.raises(ClusterError, match="s is gone or has restarted"):
        Operator().act(ClusterSnapshot(), {"action": "kill", "member": "s", "incarnation": 0})
    assert sibling.poll() is None


def test_processes_of_others_get_no_signal(child: subprocess.Popen[bytes]) -> None:
    with pytest.raises(ClusterError, match="started by hand"):
        act("kill", member(child.pid))
    assert child.poll() is None


def test_other_roles_and_machines_get_no_signal(sibling: subprocess.Popen[bytes]) -> None:
    for other, reason in (
        (member(sibling.pid, Role.MONITOR), "not a live expert server or engine"),
        (member(sibling.pid, host="elsewhere"), "runs on elsewhere"),
        # A member states its own pid.
        (member(sibling.pid, name="rogue"), "is another process: nothing was sent to it"),
    ):
        with pytest.raises(ClusterError, match=reason):
            act("kill", other)
    assert sibling.poll() is None


@pytest.mark.parametrize("pid", [0, -1, 2**31, 2**64 - 1])
def test_invalid_process_ids(pid: int) -> None:
    assert paused(snapshot(member(pid))) == []
    with pytest.raises(ClusterError, match=rf"s \(pid {pid}\): (No such process|Invalid argument)"):
        act("kill", member(pid))


@pytest.mark.parametrize("servers", [None, 0, -1, float("nan"), float("inf")])
def test_invalid_numbers_scale_nothing(servers: float | None) -> None:
    with pytest.raises(ClusterError, match="enter the number of servers: 1 or more"):
        Operator().act(ClusterSnapshot(), {"action": "scale", "servers": servers})


@pytest.mark.parametrize("order", [{"action": "scale", "servers": 3}, {"action": "rebalance"}])
def test_actions_without_a_balancer_fail(order: dict[str, object]) -> None:
    with pytest.raises(ClusterError, match="no balancer lives"):
        Operator().act(ClusterSnapshot(), order)
