"""Several monitors with a real ZooKeeper: one leads, and the next leader continues its history."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from kazoo.client import KazooClient

from control_plane import (
    SERVING,
    Observer,
    Plane,
    Visitors,
    check_one_history,
    eventually,
    has_state,
    monitor_process,
    registration,
)
from eaas.config import MonitorConfig
from eaas.errors import ClusterError, ConfigError, StoreError
from eaas.membership.monitors import LEADER_KEY
from eaas.net.grpc_client import channel
from eaas.rpc.v1 import monitor_pb2_grpc
from eaas.types import Member, MemberState, Role
from monitor.incarnation import MemberEvent
from monitor.main import Monitor
from monitor.store import Change, StoreLostError
from monitor.store.zookeeper import ZooKeeperStore
from zookeeper_box import ZooKeeperBox, missing

pytestmark = [
    pytest.mark.integration,
    pytest.mark.timeout(300),
    pytest.mark.skipif(missing() is not None, reason=str(missing())),
]
SESSION_S = 2.0
CALL_S = 3.0
TAKEOVERS = int(os.environ.get("KILL_MOMENTS", "1"))


@pytest.fixture(scope="module")
def zookeeper(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ZooKeeperBox]:
    box = ZooKeeperBox(tmp_path_factory.mktemp("zookeeper") / "data")
    yield box
    box.stop()


@pytest.fixture
def settings(zookeeper: ZooKeeperBox, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings of one test's monitors."""
    root = "".join(c if c.isalnum() else "-" for c in request.node.name)
    return {
        "store": "zookeeper",
        "zookeeper_hosts": zookeeper.hosts,
        "zookeeper_root": f"/{root}",
        "zookeeper_session_s": SESSION_S,
    }


@pytest.fixture
def connect(zookeeper: ZooKeeperBox) -> Iterator[Callable[[], KazooClient]]:
    clients: list[KazooClient] = []

    def start() -> KazooClient:
        clients.append(KazooClient(zookeeper.hosts, timeout=SESSION_S))
        clients[-1].start(10)
        return clients[-1]

    yield start
    for client in clients:
        client.stop()
        client.close()


def refusal(address: str) -> grpc.RpcError | None:
    """What a monitor answers who would register; None: it takes them."""
    with channel(address) as line:
        try:
            stub = monitor_pb2_grpc.MonitorServiceStub(line)
            stub.Register(registration("visitor"), timeout=CALL_S)
        except grpc.RpcError as error:
            return error
    return None


# -- the store ----------------------------------------------------------------------------------------


def event(revision: int, member_id: str, state: MemberState = SERVING) -> MemberEvent:
    return MemberEvent(revision, Member(member_id, Role.EXPERT_SERVER, 1, "h", "h:1", state), "")


def test_what_was_written_is_read(connect: Callable[[], KazooClient]) -> None:
    store = ZooKeeperStore(connect(), "/read", 10.0)
    assert (store.epoch, store.kept.revision, store.kept.events) == (1, 0, ())
    names = ["a", "b", "..c", "A_b-9", "1.2", "m" * 255, "z"]
    events = tuple(event(i + 1, name) for i, name in enumerate(names))
    store.write(Change(7, 4, events))
    store.write(Change(9, 5, (event(9, "a"),), removed=("b", "never there")))
    for data in (b"old", b"new" * 150_000):
        store.write(Change(9, 5, records=(("..c", data), ("b", data))))
    after = ZooKeeperStore(connect(), "/read", 10.0)
    assert after.epoch == 2
    assert after.kept.life == store.kept.life
    assert (after.kept.revision, after.kept.forgotten_incarnation) == (9, 5)
    assert after.kept.events == (*events[2:], event(9, "a"))
    assert dict(after.kept.records) == dict.fromkeys(("..c", "b"), b"new" * 150_000)
    after.write(Change(9, 5, records=(("b", b"last"),)))
    assert dict(ZooKeeperStore(connect(), "/read", 10.0).kept.records)["b"] == b"last"


def test_a_deposed_leader_writes_nothing(connect: Callable[[], KazooClient]) -> None:
    first = ZooKeeperStore(connect(), "/deposed", 10.0)
    first.write(Change(1, 0, (event(1, "a"),)))
    first.confirm()
    second = ZooKeeperStore(connect(), "/deposed", 10.0)
    # Its session lives, and it has not noticed.
    with pytest.raises(StoreLostError, match="another monitor has taken the lead"):
        first.write(Change(2, 0, (event(2, "b"), event(2, "a", MemberState.DEAD))))
    with pytest.raises(StoreLostError, match="another monitor has taken the lead"):
        first.confirm()
    second.write(Change(2, 0, (event(2, "c"),)))
    third = ZooKeeperStore(connect(), "/deposed", 10.0)
    assert [e.member.id for e in third.kept.events] == ["a", "c"]


def test_the_lead_is_confirmed_while_somebody_writes(connect: Callable[[], KazooClient]) -> None:
    """Two threads: the journal's writes, the candidate's confirmations."""
    store = ZooKeeperStore(connect(), "/confirmed", 10.0)
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit(
            lambda: [store.write(Change(n, 0, (event(n, "a"),))) for n in range(1, 301)]
        )
        while not writing.done():
            store.confirm()
        writing.result()
    assert ZooKeeperStore(connect(), "/confirmed", 10.0).kept.revision == 300


@pytest.mark.parametrize(
    ("path", "data", "says"),
    [
        ("state", b"{", "is damaged"),
        ("state", b"[1]", "is damaged"),
        ("state", b'{"schema": 1}', "is damaged"),
        ("state", b'{"schema": 2}', "newer version .schema 2, this one knows 1"),
        ("members/m-a", b"\xff\xff", "is damaged"),
    ],
)
def test_what_cannot_be_read_is_named(
    connect: Callable[[], KazooClient], settings: dict[str, Any], path: str, data: bytes, says: str
) -> None:
    client, root = connect(), settings["zookeeper_root"]
    ZooKeeperStore(client, root, 10.0).write(Change(1, 0, (event(1, "a"),)))
    client.set(f"{root}/monitor/{path}", data)
    with pytest.raises(StoreError, match=f"ZooKeeper's {root}/monitor.* {says}"):
        ZooKeeperStore(client, root, 10.0)
    failures: list[str] = []
    monitor = Monitor(MonitorConfig(**settings), failures.append)
    eventually(lambda: failures)
    monitor.stop()
    assert says.split(" .")[0] in failures[0]


# -- the election -------------------------------------------------------------------------------------


def test_no_zookeeper_is_an_error_that_names_it(settings: dict[str, Any]) -> None:
    wrong = settings | {"zookeeper_hosts": "127.0.0.1:1", "zookeeper_session_s": 0.2}
    with pytest.raises(ClusterError, match=r"cannot reach ZooKeeper at 127.0.0.1:1: .*; check"):
        Monitor(MonitorConfig(**wrong))


def test_one_leads_and_the_other_names_it(plane: Plane, settings: dict[str, Any]) -> None:
    first = plane.monitor(**settings)
    eventually(lambda: first.leads)
    second = plane.monitor(**settings)

    def named() -> bool:
        error = refusal(second.address)
        assert error is not None
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        return (LEADER_KEY, first.address) in error.trailing_metadata()

    eventually(named)
    member = plane.observe(f"{second.address},{first.address}", "member")
    member.wait(has_state("member", SERVING))
    with pytest.raises(ClusterError, match=f"the one at {first.address} leads: give both"):
        Observer(second.address, "lost", register_timeout_s=0.5)

    # A leader that stops hands over without a timeout.
    began = time.monotonic()
    first.stop()
    member.wait(lambda v: v.members["monitor"].address == second.address)
    print(f"handed over in {time.monotonic() - began:.2f} s")
    assert member.session.incarnation == 1
    assert member.session.view.members["monitor"].incarnation == 2


# Visitors stay members until the end of the test, so that accepted ones can be found.
LONG = {"lease_s": 300.0}


def test_a_leader_that_was_stopped_accepts_nothing_when_it_wakes(
    cleanup: ExitStack, settings: dict[str, Any]
) -> None:
    processes = {}
    for _ in range(2):
        process, address = monitor_process(cleanup, **settings, **LONG)
        processes[address] = process
    one, other = processes
    eventually(lambda: refusal(one) is None)
    visitors = [Visitors(address) for address in processes]
    for v in visitors:
        cleanup.callback(v.stop)
    turns = ((one, other, visitors[1]), (other, one, visitors[0]))
    for leader, heir, heirs in turns[:TAKEOVERS]:
        eventually(lambda leader=leader: refusal(leader) is None)
        began = time.monotonic()
        processes[leader].send_signal(signal.SIGSTOP)
        eventually(lambda heirs=heirs, began=began: heirs.since(began))
        print(f"{heir} leads after {heirs.since(began)[0].answered_at - began:.2f} s")
        time.sleep(0.5)
        woken = time.monotonic()
        processes[leader].send_signal(signal.SIGCONT)
        eventually(lambda leader=leader: LEADER_KEY in dict(_metadata(refusal(leader))))
        assert heirs.since(woken)
    for v in visitors:
        v.stop()
    check_one_history(visitors, heir)


def _metadata(error: grpc.RpcError | None) -> Any:
    return () if error is None else error.trailing_metadata() or ()


def test_without_zookeeper_nobody_leads_and_with_it_one_does(
    cleanup: ExitStack, settings: dict[str, Any], zookeeper: ZooKeeperBox
) -> None:
    addresses = [monitor_process(cleanup, **settings, **LONG)[1] for _ in range(2)]
    eventually(lambda: any(refusal(address) is None for address in addresses))
    visitors = [Visitors(address) for address in addresses]
    for v in visitors:
        cleanup.callback(v.stop)
    eventually(lambda: sum(len(v.accepted) for v in visitors) > 5)
    cleanup.callback(zookeeper.resume)
    began = time.monotonic()
    zookeeper.pause()
    eventually(lambda: time.monotonic() > began + SESSION_S + 1.0)
    # It stopped serving although ZooKeeper told it nothing.
    assert all(refusal(address) is not None for address in addresses)
    late = [one for v in visitors for one in v.accepted if one.answered_at > began + SESSION_S]
    assert late == []
    woken = time.monotonic()
    zookeeper.resume()
    eventually(lambda: any(v.since(woken) for v in visitors))
    first = min(one.answered_at for v in visitors for one in v.since(woken))
    print(f"a monitor leads {first - woken:.2f} s after ZooKeeper woke")
    time.sleep(1.0)
    for v in visitors:
        v.stop()
    leaders = [address for address in addresses if refusal(address) is None]
    assert len(leaders) == 1
    check_one_history(visitors, leaders[0])


def test_a_lost_connection_is_no_lost_member(
    plane: Plane, settings: dict[str, Any], connect: Callable[[], KazooClient]
) -> None:
    monitor = plane.monitor(**settings)
    eventually(lambda: monitor.leads)
    member = plane.observe(monitor.address, "member")
    member.wait(has_state("member", SERVING))
    client = connect()
    election = f"{settings['zookeeper_root']}/monitor/election"
    (node,) = client.get_children(election)
    # As if its session had ended: its election node is gone, and the state has another version.
    client.delete(f"{election}/{node}")
    state, _ = client.get(f"{settings['zookeeper_root']}/monitor/state")
    epoch = json.loads(state)["epoch"]
    client.set(f"{settings['zookeeper_root']}/monitor/state", state)
    member.wait(lambda v: v.members["monitor"].incarnation == 2)
    state, _ = client.get(f"{settings['zookeeper_root']}/monitor/state")
    assert json.loads(state)["epoch"] == epoch + 1
    assert (member.session.incarnation, member.incarnations) == (1, [])
    assert all(v.members["member"].state is SERVING for v in member.views)


def test_kazoo_that_is_not_there(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    for name in ("monitor.store.candidate", "monitor.store.zookeeper"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "kazoo", None)
    for name in [name for name in sys.modules if name.startswith("kazoo.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError, match=r"pip install 'expert-as-a-service\[zookeeper\]'"):
        Monitor(MonitorConfig(**settings))
