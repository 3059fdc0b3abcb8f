"""The launcher scales one server at a time to the last requested number, and each request once."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import grpc
import pytest

from balancer.service import BalancerService
from eaas.config import BalancerConfig, ClusterConfig
from eaas.control_plane.balancer_client import BalancerClient
from eaas.errors import ClusterError
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas_cli.commands import up
from eaas_cli.local import LocalCluster
from eaas_cli.local.scaling import Scaler


class Child:
    name, pid = "expert-server-1", 11

    def __init__(self) -> None:
        self.address: str | None = None
        self.signals: list[Any] = []

    def read(self) -> None:
        pass

    def last_words(self) -> str:
        assert not self.signals, "its log is closed by then"
        return "it loads"

    def end(self) -> None:
        self.signals.append("end")


class Cluster:
    def __init__(self, apply_timeout_s: float = 60.0) -> None:
        self.config = ClusterConfig(balancer=BalancerConfig(apply_timeout_s=apply_timeout_s))
        self.tls = None
        self.child = Child()
        self.running: list[Child] = []

    def balancer_address(self) -> str | None:
        return None

    def running_servers(self) -> list[Child]:
        return self.running

    def add_server(self, others: Collection[str] = ()) -> Child:
        self.others = others
        self.running.append(self.child)
        return self.child


def test_a_server_that_is_not_ready_in_time_is_stopped() -> None:
    cluster = Cluster(apply_timeout_s=1e-9)
    scaler = Scaler(cluster)  # type: ignore[arg-type]
    scaler.want(1)
    assert scaler.step() == ["expert-server-1 (pid 11) starts"]
    with pytest.raises(ClusterError, match=r"was not ready in time and was stopped.*it loads"):
        scaler.step()
    assert cluster.child.signals
    assert not scaler.busy


def test_a_failed_poll_is_repeated() -> None:
    cluster = Cluster()
    looks = iter([False, True])

    def others() -> set[str]:
        if not next(looks):
            raise ClusterError("the endpoint is slow")
        return set()

    scaler = Scaler(cluster, others)  # type: ignore[arg-type]
    scaler.want(1)
    assert scaler.step() == []
    assert scaler.step() == ["expert-server-1 (pid 11) starts"]


def test_a_server_restarted_by_hand_keeps_its_name() -> None:
    cluster = Cluster()
    scaler = Scaler(cluster, lambda: {"expert-server-0"})  # type: ignore[arg-type]
    scaler.want(2)
    scaler.step()
    assert cluster.others == {"expert-server-0"}

    started: list[int] = []
    real = LocalCluster.__new__(LocalCluster)
    real.children, real._devices = {}, ()
    real._spawn_server = lambda index, model: started.append(index)  # type: ignore[method-assign, assignment, return-value]
    real.add_server(others={"expert-server-0", "by-hand"})
    assert started == [1]


def test_no_server_leaves_without_a_balancer() -> None:
    cluster = Cluster()
    cluster.add_server()
    scaler = Scaler(cluster, lambda: (), lambda: None)  # type: ignore[arg-type]
    scaler.want(0)
    assert scaler.step() == []
    assert scaler.busy


def test_servers_started_by_hand_and_the_balancers_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def member(role: str, pid: int, state: str = "SERVING") -> dict[str, Any]:
        return {"id": f"m{pid}", "role": role, "pid": pid, "state": state, "address": f"h:{pid}"}

    members = [
        member("expert-server", 1),
        member("expert-server", 2),
        member("expert-server", 3, "DEAD"),
        member("balancer", 4, "DEAD"),
        member("balancer", 5),
    ]
    monkeypatch.setattr(up, "fetch_status", lambda endpoint, key_file: {"members": members})
    cluster = LocalCluster.__new__(LocalCluster)
    cluster.endpoint, cluster.config = "", ClusterConfig()
    # It left without a goodbye: the monitor still believes in it, the launcher does not have it any more.
    cluster.children, cluster.births = {}, {1: 1}
    assert up._started_by_hand(cluster) == {"m2"}
    assert up._balancer_address(cluster) == "h:5"


class Context:
    def add_callback(self, callback: Any) -> bool:
        return True

    def is_active(self) -> bool:
        return True


def watch(service: BalancerService, known: int) -> Iterator[pb.WatchScaleResponse]:
    return service.WatchScale(pb.WatchScaleRequest(known_wish=known), Context())


def test_a_new_stream_does_not_repeat_a_number() -> None:
    service = BalancerService(lambda question: 1, None, None, 1.0, 64)
    first = watch(service, 0)
    next(first)
    service.Scale(pb.ScaleRequest(servers=5), Context())
    said = next(first)
    assert said.servers == 5
    again = watch(service, said.wish)
    assert next(again).wish == said.wish
    service.Scale(pb.ScaleRequest(servers=5), Context())
    assert next(again).servers == 5
    # It was said while the stream was broken.
    late = watch(service, said.wish)
    assert [next(late).servers, next(late).servers] == [0, 5]


def test_another_balancer_counts_from_the_beginning() -> None:
    stream = watch(BalancerService(lambda question: 1, None, None, 1.0, 64), 3)
    assert next(stream).servers == 0
    known = next(stream)
    assert (known.servers, known.wish) == (0, 0)


class Aborted(Exception):
    """Raised by `abort`, as gRPC's does."""


class Refusing(Context):
    def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = code, details
        raise Aborted


@pytest.mark.parametrize(
    ("servers", "words"),
    [
        (0, "0 servers would hold no experts"),
        (1, "1 server cannot hold each expert on 3"),
        (2, "give at least 3, or start the cluster with a lower --redundancy"),
        (65, "balancer.max_servers allows 64 at most"),
        (1_000_000, "1,000,000 servers: balancer.max_servers allows 64"),
    ],
)
def test_a_number_of_servers_has_bounds(servers: int, words: str) -> None:
    service = BalancerService(lambda question: 3, None, None, 1.0, 64)
    # Kept: a launcher that is gone takes no wishes.
    launcher = watch(service, 0)
    next(launcher)
    context = Refusing()
    with pytest.raises(Aborted):
        service.Scale(pb.ScaleRequest(servers=servers), context)
    assert context.code is grpc.StatusCode.INVALID_ARGUMENT
    assert words in context.details


def test_a_refusal_belongs_to_its_request() -> None:
    service = BalancerService(lambda question: 1, None, None, 1.0, 64)
    launcher = watch(service, 0)
    next(launcher)
    first = service.Scale(pb.ScaleRequest(servers=4), Context()).wish
    service.RefuseScale(pb.RefuseScaleRequest(wish=first, reason="no room"), Context())
    told = service.GetScale(pb.GetScaleRequest(), Context())
    assert (told.wish, told.refusal, told.fewest, told.most) == (first, "no room", 1, 64)
    second = service.Scale(pb.ScaleRequest(servers=5), Context()).wish
    assert second != first
    service.RefuseScale(pb.RefuseScaleRequest(wish=first, reason="late"), Context())
    assert service.GetScale(pb.GetScaleRequest(), Context()).refusal == ""


def test_the_balancer_learns_why_scaling_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(BalancerClient, "refuse_scale", lambda *call: told.append(call[1:]))
    scaler = Scaler(Cluster(), lambda: ("a", "b"), lambda: "h:1")  # type: ignore[arg-type]
    scaler.want(1, wish=5)
    with pytest.raises(ClusterError, match="2 servers started by hand"):
        scaler.step()
    assert told == [(5, "2 servers started by hand: end one with `eaas drain`")]
    assert not scaler.busy
