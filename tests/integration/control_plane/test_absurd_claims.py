"""Out-of-range numbers from members, stores and records: refused or ignored, and no process ends."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import grpc
import pytest

from balancer.main import Balancer
from control_plane import SERVING, Observer, Plane, eventually, registration
from eaas.config import MonitorConfig
from eaas.errors import StoreError
from eaas.net.grpc_client import channel
from eaas.net.message_ranges import MOST_EPOCH, TRUSTED_EPOCH
from eaas.rpc.v1 import common_pb2, monitor_pb2, monitor_pb2_grpc
from eaas.types import MemberState, Role
from monitor.main import Monitor

pytestmark = pytest.mark.integration

WIDE_OPEN = 2**64 - 1


def claim(address: str, epoch: int) -> None:
    """Register one member that claims an epoch in its heartbeat."""
    with channel(address) as opened:
        stub = monitor_pb2_grpc.MonitorServiceStub(opened)
        request = registration("liar", Role.ATTENTION_CLIENT)
        incarnation = stub.Register(request, timeout=10).incarnation
        beat = monitor_pb2.HeartbeatRequest(
            id="liar", incarnation=incarnation, state=common_pb2.MEMBER_STATE_SERVING, epoch=epoch
        )
        next(iter(stub.Heartbeat(iter([beat]), timeout=10)))


def test_an_epoch_beyond_all_range_is_refused_by_name(plane: Plane) -> None:
    monitor = plane.monitor()
    for epoch in (WIDE_OPEN, MOST_EPOCH + 1):
        with pytest.raises(grpc.RpcError) as caught:
            claim(monitor.address, epoch)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == (
            f"HeartbeatRequest.epoch is {epoch}: it can be 0 to {MOST_EPOCH}"
        )


def epoch_of(balancer: Balancer) -> int:
    placement = balancer.rebalancer.snapshot().placement
    return placement.epoch if placement else 0


@pytest.mark.parametrize("epoch", [MOST_EPOCH, TRUSTED_EPOCH + 1])
def test_a_balancer_starts_despite_a_member_with_an_absurd_epoch(
    plane: Plane, caplog: pytest.LogCaptureFixture, epoch: int
) -> None:
    monitor = plane.monitor()
    first = plane.balancer(monitor.address, redundancy=1)
    servers = [plane.server(monitor.address, name) for name in ("s1", "s2")]
    eventually(lambda: epoch_of(first))
    claim(monitor.address, epoch)
    first.stop()
    second = plane.balancer(monitor.address, redundancy=1)
    eventually(lambda: epoch_of(second))
    assert epoch_of(second) == 1001, "an epoch of its own incarnation, as if nobody had claimed one"
    assert [server.epoch for server in servers] == [1001, 1001]
    assert second.failure is None
    assert f"liar claims epoch {epoch}" in caplog.text


def test_a_balancer_goes_on_from_the_largest_epoch_that_it_believes(plane: Plane) -> None:
    monitor = plane.monitor()
    claim(monitor.address, TRUSTED_EPOCH)
    balancer = plane.balancer(monitor.address, redundancy=1)
    servers = [plane.server(monitor.address, name) for name in ("s1", "s2")]
    eventually(lambda: epoch_of(balancer))
    eventually(lambda: all(server.epoch == TRUSTED_EPOCH + 1 for server in servers))


def _store(directory: Path, *events: monitor_pb2.MemberEvent) -> None:
    """Write the store of an earlier release, which did not check numbers."""
    Monitor(MonitorConfig(data_dir=str(directory))).stop()
    with sqlite3.connect(directory / "monitor.db") as file:
        for event in events:
            file.execute(
                "INSERT OR REPLACE INTO members VALUES (?, ?, ?)",
                (event.member.id, event.revision, event.SerializeToString()),
            )
        file.execute("INSERT OR REPLACE INTO records VALUES ('balancer', x'ff')")
    file.close()


def event(revision: int, member_id: str, epoch: int = 0) -> monitor_pb2.MemberEvent:
    member = common_pb2.Member(
        id=member_id,
        role=common_pb2.ROLE_EXPERT_SERVER,
        state=common_pb2.MEMBER_STATE_DEAD,
        incarnation=3,
        epoch=epoch,
    )
    return monitor_pb2.MemberEvent(revision=revision, member=member)


def test_absurd_members_in_a_store_are_ignored(
    plane: Plane, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _store(tmp_path, event(1, "sound"), event(1, "liar", WIDE_OPEN), event(1, "<b>"))
    observer = plane.observe(plane.monitor(data_dir=str(tmp_path)).address)
    observer.wait(lambda view: "sound" in view.members)
    assert observer.session.view.members["sound"].state is MemberState.DEAD
    assert not observer.session.view.members.keys() & {"liar", "<b>"}
    assert f"MemberEvent.member.epoch is {WIDE_OPEN}" in caplog.text
    assert "the record of balancer is ignored" in caplog.text


@pytest.mark.parametrize("value", ["-1", "'x'", "1.5", str(2**62)])
def test_a_damaged_history_is_one_clear_error(tmp_path: Path, value: str) -> None:
    _store(tmp_path)
    with sqlite3.connect(tmp_path / "monitor.db") as file:
        file.execute(f"UPDATE history SET forgotten_incarnation = {value}")
    file.close()
    with pytest.raises(
        StoreError, match=r"is damaged \(its forgotten_incarnation is .*move it away"
    ):
        Monitor(MonitorConfig(data_dir=str(tmp_path)))


def test_frontends_after_a_restart_and_for_an_earlier_release(plane: Plane, tmp_path: Path) -> None:
    first = Monitor(MonitorConfig(data_dir=str(tmp_path)))
    with channel(first.address) as opened:
        monitor_pb2_grpc.MonitorServiceStub(opened).Register(registration("f", Role.FRONTEND))
    first.stop()
    # A monitor of an earlier release cannot read the role.
    with sqlite3.connect(tmp_path / "monitor.db") as file:
        ((data,),) = file.execute("SELECT event FROM members WHERE id = 'f'")
    file.close()
    kept = monitor_pb2.MemberEvent.FromString(data)
    assert kept.member.role == common_pb2.ROLE_ATTENTION_CLIENT
    observer = plane.observe(plane.monitor(data_dir=str(tmp_path)).address)
    assert observer.wait(lambda view: "f" in view.members).members["f"].role is Role.FRONTEND


def test_left_members_after_a_restart_and_for_an_earlier_release(
    plane: Plane, tmp_path: Path
) -> None:
    first = Monitor(MonitorConfig(data_dir=str(tmp_path)))
    gone = Observer(first.address, "gone")
    gone.wait(lambda view: "gone" in view.members)
    gone.session.close()
    first.stop()
    # A monitor of an earlier release reads it as DEAD.
    with sqlite3.connect(tmp_path / "monitor.db") as file:
        ((data,),) = file.execute("SELECT event FROM members WHERE id = 'gone'")
    file.close()
    kept = monitor_pb2.MemberEvent.FromString(data)
    assert kept.member.state == common_pb2.MEMBER_STATE_DEAD
    second = plane.monitor(data_dir=str(tmp_path))
    observer = plane.observe(second.address)
    view = observer.wait(lambda view: "gone" in view.members)
    assert view.members["gone"].state is MemberState.LEFT
    with channel(second.address) as opened:
        # A watcher of an earlier release does not know LEFT.
        for knows_left, state in (
            (False, common_pb2.MEMBER_STATE_DEAD),
            (True, common_pb2.MEMBER_STATE_LEFT),
        ):
            request = monitor_pb2.WatchRequest(knows_left=knows_left)
            watch = monitor_pb2_grpc.MonitorServiceStub(opened).Watch(request, timeout=10)
            told = {m.id: m.state for m in next(iter(watch)).snapshot.members}
            watch.cancel()
            assert told["gone"] == state
            assert told["observer"] == SERVING.number
