"""Connections follow the membership view: new, replaced and lost server processes. No network."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from prometheus_client import CollectorRegistry

from attention_client import cluster as cluster_module
from attention_client.cluster import Cluster
from attention_client.connections import opening as connecting
from attention_client.connections import server_connections as module
from attention_client.connections.connection import Connection
from attention_client.connections.deadlines import ServiceTimes
from attention_client.telemetry.metrics import ClientMetrics
from attention_client.telemetry.request_outcomes import Outcome
from eaas.config import AttentionClientConfig
from eaas.errors import ClusterError
from eaas.membership.cluster_view import MembershipView
from eaas.spares import SpareReplicas
from eaas.types import Member, MemberState, ModelShape, Placement, Role
from waiting import eventually

SHAPE = ModelShape("tiny", 8, 64, 2, ("l0",), "float32", "digest-a")
PATIENCE_S = 20.0


class Quiet:
    """A passive session, watch or reporter."""

    incarnation, heartbeat_s = 1, 0.9

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.view = MembershipView()

    def close(self, deregister: bool = True) -> None:
        """Nothing runs."""

    report_now = close


class Dialled:
    """Records dialled addresses; every call fails."""

    def __init__(self, error: Exception) -> None:
        self.error = error
        self._changed = threading.Condition()
        self.addresses: list[str] = []

    def __call__(self, address: str, *_peer_and_identity: object) -> Any:
        with self._changed:
            self.addresses.append(address)
            self._changed.notify_all()
        raise self.error

    def wait_for(self, wanted: Callable[[list[str]], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: wanted(self.addresses), PATIENCE_S)


class Made:
    """A fake connection that reports its loss to the cluster."""

    transport, server_id = "shm", "s1"
    lost_reason: str | None = None

    def __init__(self, cluster: Cluster, incarnation: int) -> None:
        self.cluster, self.incarnation = cluster, incarnation
        self.service, self.closed = ServiceTimes(), threading.Event()

    def lose(self, reason: str) -> None:
        if self.lost_reason is None:
            self.lost_reason = reason
            self.cluster._servers.lost(cast("Connection", self))

    def owes_answer(self) -> bool:
        return False

    def close(self) -> None:
        self.lose("closed")
        self.closed.set()

    def wake(self) -> None:
        """No waiters."""


@pytest.fixture
def dialled(monkeypatch: pytest.MonkeyPatch) -> Dialled:
    dialled = Dialled(ClusterError("nobody there"))
    monkeypatch.setattr(connecting, "open_channel", dialled)
    return dialled


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, dialled: Dialled) -> Iterator[Cluster]:
    for name in ("MemberSession", "PlacementWatch", "OutcomeReporter"):
        monkeypatch.setattr(cluster_module, name, Quiet)
    monkeypatch.setattr(module, "_RECONNECT_S", 0.02)
    metrics = ClientMetrics(CollectorRegistry())
    running = Cluster("m:1", SHAPE, AttentionClientConfig(), metrics)
    yield running
    running.close()


def server(address: str, incarnation: int = 1, pid: int = 7) -> Member:
    role, state = Role.EXPERT_SERVER, MemberState.SERVING
    return Member("s1", role, pid, "h", address, state, incarnation=incarnation)


def view(*members: Member) -> MembershipView:
    told: Mapping[str, Member] = {m.id: m for m in members}
    return MembershipView(1, MappingProxyType(dict(told)), time.monotonic())


def put_on_list(cluster: Cluster, member: Member, connection: Made) -> None:
    cluster._servers._members = view(member)
    cluster._servers._add(member, cast("Connection", connection))


def test_a_new_process_is_dialled_even_with_a_repeated_incarnation(
    cluster: Cluster, dialled: Dialled
) -> None:
    """14: a server restarts on the same address: new incarnation; clients reconnect."""
    cluster._on_members(view(server("old:1")))
    dialled.wait_for(lambda asked: asked.count("old:1") >= 2)
    cluster._on_members(view(server("new:1", pid=8)))
    dialled.wait_for(lambda asked: "new:1" in asked)
    # The attempts to connect to the old process end.
    dialled.wait_for(lambda asked: asked[-3:] == ["new:1"] * 3)


@pytest.mark.parametrize("incarnation", [1, 2, 3])
def test_the_connection_to_a_former_process_is_lost(cluster: Cluster, incarnation: int) -> None:
    former = Made(cluster, 2)
    put_on_list(cluster, server("old:1", 2), former)
    cluster._on_members(view(server("old:1", 2)))
    assert former.lost_reason is None
    cluster._on_members(view(server("new:1", incarnation, pid=8)))
    assert former.lost_reason is not None


def test_outcomes_restart_with_a_lower_incarnation(cluster: Cluster) -> None:
    former, present = Made(cluster, 2), Made(cluster, 1)
    outcomes = cluster.metrics.outcomes
    put_on_list(cluster, server("old:1", 2), former)
    outcomes.count(former, Outcome.LOST)
    put_on_list(cluster, server("new:1", 1), present)
    outcomes.count(present, Outcome.ANSWERED)
    (told,) = outcomes.read()
    assert (told.server_incarnation, told.answered, told.lost) == (1, 1, 0)


def test_an_unexpected_error_backs_off_too(
    cluster: Cluster, dialled: Dialled, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    pause = SimpleNamespace(next_s=lambda: waited.append(0.0) or 0.005)
    monkeypatch.setattr(module, "Backoff", lambda *_: pause)
    dialled.error = RuntimeError("a bug")
    cluster._on_members(view(server("a:1")))
    dialled.wait_for(lambda asked: len(asked) >= 5)
    # One thread, which pauses after each try.
    assert len(waited) >= 4
    assert "a bug" in cluster._servers.refusals()["s1"]


class Connector:
    """Makes fake connections.

    Attributes:
        made: The connections, in order.
        ready: By address: `connect` waits for it.
        before: Called with each listed connection before `connect` returns.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.made: list[Made] = []
        self.ready: dict[str, threading.Event] = {}
        self.before: Callable[[Made], None] = lambda _made: None

    def connect(self, member: Member, _incarnation: int, list_it: Callable[[Any], None]) -> Made:
        if member.address in self.ready:
            assert self.ready[member.address].wait(PATIENCE_S)
        made = Made(self.cluster, member.incarnation)
        self.made.append(made)
        list_it(made)
        self.before(made)
        return made


def connected(cluster: Cluster) -> Any:
    return cluster._servers._connections.get("s1")


def test_a_late_connection_to_a_former_process_replaces_nothing(
    cluster: Cluster,
) -> None:
    connector = Connector(cluster)
    cluster._servers._open = cast("Any", connector.connect)
    connector.ready["old:1"] = threading.Event()
    cluster._on_members(view(server("old:1", 1)))
    eventually(lambda: cluster._servers._connecting)
    cluster._on_members(view(server("new:1", 2, pid=8)))
    eventually(lambda: connected(cluster))
    present = connected(cluster)
    connector.ready["old:1"].set()
    eventually(lambda: len(connector.made) == 2)
    late = connector.made[1]
    assert late.closed.wait(PATIENCE_S)
    assert connected(cluster) is present
    assert (present.incarnation, present.lost_reason) == (2, None)
    assert cluster._servers._processes["s1"] == server("new:1", 2, pid=8).process


@pytest.mark.parametrize("moment", ["before it returns", "after it was looked at"])
def test_a_connection_lost_during_its_opening_is_opened_again(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    connector = Connector(cluster)
    cluster._servers._open = cast("Any", connector.connect)

    def lose(made: Made) -> None:
        """Lose the first connection while its connecting thread still runs."""
        if len(connector.made) == 1:
            made.lose("its stream broke")
            assert made.closed.wait(PATIENCE_S)
            eventually(lambda: not any(t.name == "after-loss" for t in threading.enumerate()))

    if moment == "before it returns":
        connector.before = lose
    else:
        info = module._log.info

        def note(text: str, *arguments: object) -> None:
            info(text, *arguments)
            if text == "%s: connected (%s)":
                lose(connector.made[-1])

        monkeypatch.setattr(module._log, "info", note)
    cluster._on_members(view(server("a:1")))
    eventually(lambda: len(connector.made) == 2 and connected(cluster) is connector.made[1])
    assert connector.made[1].lost_reason is None


def placed(epoch: int) -> Placement:
    holds_LSE = np.zeros((1, 2, 8), bool)
    holds_LSE[0, 0] = True
    return Placement(epoch, ("s1", "s2"), holds_LSE, holds_LSE.astype(np.float32))


def replicas(cluster: Cluster) -> list[int]:
    """Replicas of each expert that dispatch chooses from."""
    found = cluster.view().replicas(np.ones(2, bool))
    return np.diff(found.first_LX[0]).tolist()


def test_spare_replicas_belong_to_one_placement(cluster: Cluster) -> None:
    spares = SpareReplicas(1, {"s2": frozenset({(0, 3), (0, 5)})})
    cluster._on_spares(spares)
    cluster._on_placement(placed(1))
    assert replicas(cluster) == [1, 1, 1, 2, 1, 2, 1, 1]
    # They are no part of the placement's coverage.
    assert cluster.view().placement.holds_LSE[0, 1].sum() == 0
    cluster._on_placement(placed(2))
    assert replicas(cluster) == [1] * 8
    cluster._on_spares(SpareReplicas(2, {"s2": frozenset({(0, 0)})}))
    assert replicas(cluster) == [2, 1, 1, 1, 1, 1, 1, 1]


def test_a_stale_answer_ends_the_use_of_a_servers_spare_replicas(cluster: Cluster) -> None:
    cluster._on_placement(placed(1))
    spares = SpareReplicas(1, {"s2": frozenset({(0, 3)}), "s3": frozenset({(0, 1)})})
    cluster._on_spares(spares)
    before = cluster.view()
    # What is said twice makes no new view.
    cluster._on_spares(SpareReplicas(1, dict(spares.held)))
    assert cluster.view() is before
    cluster._on_stale("s2", cluster.view().spares)
    assert replicas(cluster) == [1] * 8
    assert set(cluster.view().spares.held) == {"s3"}
    # The balancer's next word counts, also against an answer to a request from before.
    cluster._on_spares(SpareReplicas(1, dict(spares.held)))
    cluster._on_stale("s2", before.spares)
    assert replicas(cluster) == [1, 1, 1, 2, 1, 1, 1, 1]


def test_fixed_shares_have_no_spare_replicas(cluster: Cluster) -> None:
    cluster._levels = False
    cluster._on_placement(placed(1))
    cluster._on_spares(SpareReplicas(1, {"s2": frozenset({(0, 3)})}))
    assert replicas(cluster) == [1] * 8


def test_other_connections_keep_the_list_of_replicas(cluster: Cluster) -> None:
    cluster._on_placement(placed(1))
    first = cluster.view().replicas(np.ones(2, bool))
    cluster._refresh()
    assert cluster.view().replicas(np.ones(2, bool)) is first
