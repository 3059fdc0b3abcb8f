"""Records of servers on loopback and their secrets."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import grpc
import pytest

from eaas import user_files
from eaas.net import server_records
from eaas.net.grpc_failure import CallFailure
from eaas.net.grpc_secret import proof
from eaas.net.server_records import ServerRecord

ADDRESS = "127.0.0.1:4242"
PROC = os.stat("/proc").st_dev


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(user_files, "candidates", lambda: (tmp_path / "eaas",))
    return tmp_path / "eaas"


@pytest.fixture
def other_pid() -> Iterator[int]:
    """Pid of a live process."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield process.pid
        process.kill()


def leave_dead(address: str, secret: str, *, keep: bool = False) -> None:
    """Leave the record of an ended process whose pid is in use again."""
    started = server_records.started_at(os.getpid()) - 1
    record = ServerRecord(secret, os.getpid(), PROC, started, keep)
    user_files.write(address, asdict(record))


def test_callers_send_the_secret_of_the_address() -> None:
    server_records.publish(ADDRESS, "s1")
    assert proof(ADDRESS) == proof("localhost:4242") == (("authorization", "Bearer s1"),)
    for other in (
        "127.0.0.1:4243",
        "192.0.2.1:4242",
        "nobody.invalid:4242",
        "m:1",
        "",
        "[::1]:4242",
    ):
        assert proof(other) == ()
    assert proof(None) == ()
    server_records.withdraw(ADDRESS)
    assert proof(ADDRESS) == ()


def test_the_secret_of_an_ended_process_is_not_sent() -> None:
    leave_dead(ADDRESS, "s1")
    with pytest.raises(CallFailure) as failure:
        proof(ADDRESS)
    assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "s1" not in str(failure.value)


def test_a_restarted_monitor_keeps_the_secret() -> None:
    leave_dead(ADDRESS, "s1", keep=True)
    assert server_records.monitor_secret(ADDRESS) == "s1"
    first, second = (server_records.monitor_secret("127.0.0.1:0") for _ in range(2))
    assert first != second
    assert len(bytes.fromhex(first)) == 32
    assert server_records.cluster_secret(f"127.0.0.1:1, {ADDRESS}") == "s1"
    assert server_records.cluster_secret("127.0.0.1:1") is None


def test_prune_keeps_records_that_a_restart_needs(place: Path) -> None:
    server_records.publish("127.0.0.1:1", "living")
    leave_dead("127.0.0.1:2", "living", keep=True)
    leave_dead("127.0.0.1:3", "living")
    leave_dead("127.0.0.1:4", "over", keep=True)
    (place / "broken.json").write_text("{")
    server_records.prune()
    names = {path.name for path in place.iterdir()}
    assert names == {"127.0.0.1:1.json", "127.0.0.1:2.json", "broken.json"}


def test_monitors_of_one_cluster_share_a_secret() -> None:
    one, same, other = map(server_records.shared_secret, ("zk:1/a", "zk:1/a", "zk:1/b"))
    assert one == same != other


def test_a_process_lives_from_its_start_to_its_end(other_pid: int) -> None:
    started = server_records.started_at(other_pid)
    assert started > 0
    assert ServerRecord("s", other_pid, PROC, started, False).lives
    assert not ServerRecord("s", other_pid, PROC, started + 1, False).lives
    # In another container.
    assert ServerRecord("s", other_pid, PROC + 1, started + 1, False).lives
    os.kill(other_pid, 9)
    os.waitid(os.P_PID, other_pid, os.WEXITED | os.WNOWAIT)
    # A zombie counts as ended.
    assert server_records.started_at(other_pid) == 0


def test_a_record_does_not_show_its_secret() -> None:
    assert "s1" not in repr(ServerRecord("s1", 1, PROC, 2, False))
