"""The launcher scales one server at a time to the last requested number, and each request once."""

from __future__ import annotations

from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest

from eaas.config import BalancerConfig, ClusterConfig
from eaas.control_plane.balancer_client import BalancerClient
from eaas.errors import ClusterError
from eaas_cli.commands import up
from eaas_cli.local.interface import free_number
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
    assert free_number({"expert-server-0", "expert-server-2", "by-hand"}) == 1


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
    # It left without a goodbye: the monitor still believes in it, the launcher does not have it any more.
    cluster: Any = SimpleNamespace(endpoint="", config=ClusterConfig(), births={1: 1})
    assert up.started_by_hand(cluster) == {"m2"}
    assert up.live_balancer(cluster) == "h:5"


def test_the_balancer_learns_why_scaling_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[tuple[Any, ...]] = []
    monkeypatch.setattr(BalancerClient, "refuse_scale", lambda *call: told.append(call[1:]))
    scaler = Scaler(Cluster(), lambda: ("a", "b"), lambda: "h:1")  # type: ignore[arg-type]
    scaler.want(1, wish=5)
    with pytest.raises(ClusterError, match="2 servers started by hand"):
        scaler.step()
    assert told == [(5, "2 servers started by hand: end one with `eaas drain`")]
    assert not scaler.busy
