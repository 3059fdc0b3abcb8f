"""A monitor that ends or is killed, and its successor on the same data."""

from __future__ import annotations

import random
import sqlite3
import time
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from control_plane import (
    DEAD,
    SERVING,
    Observer,
    Plane,
    Visitors,
    check_one_history,
    eventually,
    has_state,
    monitor_process,
    port_of,
    registration,
)
from eaas.config import MonitorConfig
from eaas.net.grpc_client import channel
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.rpc.v1 import monitor_pb2_grpc
from monitor.main import Monitor

pytestmark = pytest.mark.integration
CALL_S = 10.0


def first_response(address: str, position: pb.WatchRequest) -> pb.WatchResponse:
    with channel(address) as line:
        # gRPC shares failed connection attempts between the channels of a process.
        stub = monitor_pb2_grpc.MonitorServiceStub(line)
        call = stub.Watch(position, timeout=CALL_S, wait_for_ready=True)
        response = next(call)
        call.cancel()
        return response


def test_a_restarted_monitor_knows_its_members_and_its_revision(
    plane: Plane, tmp_path: Path
) -> None:
    first = Monitor(MonitorConfig(data_dir=str(tmp_path)))
    a, b = plane.observe(first.address, "a"), plane.observe(first.address, "b")
    silent = Observer(first.address, "silent")
    for observer in (a, b):
        observer.wait(lambda v: all(has_state(n, SERVING)(v) for n in ("a", "b", "silent")))
    silent.session.close(deregister=False)
    known = first_response(first.address, pb.WatchRequest()).snapshot
    first.stop()
    eventually(lambda: a.session.view.age_s(time.monotonic()) > 1.5)
    changes = len(a.views)

    second = plane.monitor(port=port_of(first.address), data_dir=str(tmp_path))
    # A watcher with a recent position continues there: its first response is the next event.
    position = pb.WatchRequest(from_revision=known.revision, life=known.life)
    word = first_response(second.address, position)
    assert word.WhichOneof("kind") == "event"
    assert word.event.revision == known.revision + 1
    assert (word.event.member.id, word.event.member.incarnation) == ("monitor", 2)
    # A watcher with an older position gets a snapshot of the same history.
    word = first_response(second.address, pb.WatchRequest(from_revision=1, life=known.life))
    assert word.snapshot.life == known.life
    assert {m.id for m in word.snapshot.members} >= {"a", "b", "silent", "monitor"}

    a.wait(lambda v: v.members["monitor"].incarnation == 2)
    # The silent member, known from the store alone, is found dead; no other member is.
    a.wait(has_state("silent", DEAD))
    for view in a.views[changes:]:
        assert view.members["a"].state is view.members["b"].state is SERVING
    assert (a.session.incarnation, b.session.incarnation) == (1, 1)
    assert a.incarnations == b.incarnations == []
    revisions = [view.revision for view in a.views]
    assert revisions == sorted(revisions)


def test_a_monitor_killed_at_any_moment_loses_no_answer(tmp_path: Path, cleanup: ExitStack) -> None:
    dice = random.Random(2)
    visitors: list[Visitors] = []
    settings = {"data_dir": str(tmp_path), "lease_s": 300.0}
    port = 0
    for _ in range(4):
        process, address = monitor_process(cleanup, port=port, **settings)
        port = port_of(address)
        now = [Visitors(address) for _ in range(3)]
        wanted = dice.randrange(1, 20)
        eventually(lambda now=now, wanted=wanted: sum(len(v.accepted) for v in now) >= wanted)
        process.kill()
        for v in now:
            v.stop()
        process.wait()
        visitors += now
    _, address = monitor_process(cleanup, port=port, **settings)
    check_one_history(visitors, address)


def test_a_monitor_that_cannot_write_ends(
    plane: Plane, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, connect = [], sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda *a, **k: files.append(connect(*a, **k)) or files[-1]
    )
    failures: list[str] = []
    monitor = Monitor(MonitorConfig(data_dir=str(tmp_path)), failures.append)
    plane.stack.callback(monitor.stop)
    a = plane.observe(monitor.address, "a")
    a.wait(has_state("a", SERVING))
    files[-1].execute("PRAGMA max_page_count = 1")
    told = a.session.view.members
    a.session.close(deregister=False)
    # It answers nothing that its successor would not know.
    with channel(monitor.address) as line:
        stub = monitor_pb2_grpc.MonitorServiceStub(line)
        codes = set()
        for i in range(100):
            try:
                stub.Register(registration(f"m{i}" + 200 * "x"), timeout=CALL_S)
            except grpc.RpcError as error:
                codes.add(error.code())
                break
    assert codes == {grpc.StatusCode.UNAVAILABLE}
    eventually(lambda: failures)
    assert f"{tmp_path}/monitor.db cannot be written" in failures[0]
    assert told["a"].state is SERVING
