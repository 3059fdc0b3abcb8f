"""`eaas scale` waits for the requested number of servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import eaas.control_plane.balancer_client
from eaas.errors import ClusterError
from eaas.rpc.v1 import balancer_pb2 as pb
from eaas_cli.commands import servers
from eaas_cli.local.running_clusters import Up


def status(*states: str) -> dict[str, Any]:
    balancer = {"id": "b", "role": "balancer", "state": "SERVING", "address": "h:1", "experts": 0}
    members = [
        {"id": f"s{i}", "role": "expert-server", "state": state, "address": "h:2", "experts": 0}
        for i, state in enumerate(states)
    ]
    return {"members": [balancer, *members]}


class Balancer:
    """Accepts requests and returns a given state."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.state = pb.GetScaleResponse(wish=7)

    def __enter__(self) -> Balancer:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""

    def scale(self, servers: int) -> int:
        self.asked.append(servers)
        return 7

    def scale_state(self) -> pb.GetScaleResponse:
        return self.state


@pytest.fixture
def balancer(monkeypatch: pytest.MonkeyPatch) -> Balancer:
    made = Balancer()
    monkeypatch.setattr(eaas.control_plane.balancer_client, "BalancerClient", lambda *_: made)
    monkeypatch.setattr(servers, "POLL_S", 0.0)
    return made


def show(monkeypatch: pytest.MonkeyPatch, *documents: dict[str, Any] | None) -> Iterator[Any]:
    left = iter(documents)

    def fetch(endpoint: str, _key_file: object) -> dict[str, Any]:
        document = next(left)
        if document is None:
            raise ClusterError("nobody answers")
        return document

    monkeypatch.setattr(servers, "fetch_status", fetch)
    return left


def test_scale_accepts_servers_without_experts_and_survives_a_failed_poll(
    monkeypatch: pytest.MonkeyPatch, balancer: Balancer
) -> None:
    left = show(
        monkeypatch,
        status("SERVING"),
        None,
        status("SERVING", "JOINING"),
        None,
        status("SERVING", "SERVING"),
    )
    servers.scale(2, "http://e")
    assert balancer.asked == [2]
    assert next(left, "all were looked at") == "all were looked at"


def test_every_server_that_joins_or_leaves_is_named(
    monkeypatch: pytest.MonkeyPatch, balancer: Balancer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also one that joined between two polls."""
    two, three = ["SERVING"] * 2, ["SERVING"] * 3
    show(monkeypatch, status("SERVING"), status(*two), status(*two, "JOINING"), status(*three))
    servers.scale(3, "http://e")
    assert capsys.readouterr().out == "s1: SERVING\ns2: JOINING\ns2: SERVING\n"
    show(monkeypatch, status("SERVING"), status("SERVING"))
    servers.scale(1, "http://e")
    told = ("nothing to do: the cluster has 1 server\n", "cluster: http://e\n")
    assert capsys.readouterr() == told


@pytest.mark.parametrize(
    ("up", "remedy"),
    [
        (None, "start it again with `eaas balancer --join h:9`"),
        (Up("http://e", "", 1, 1, 1.0), "the command that `eaas up` printed when it ended, or"),
        (Up("http://e", "", 0, 0, 1.0), "Ray starts it again: try again in a minute"),
    ],
)
def test_without_a_live_balancer_the_error_says_what_starts_it(
    monkeypatch: pytest.MonkeyPatch, up: Up | None, remedy: str
) -> None:
    monkeypatch.setattr(servers, "up_at", lambda _: up)
    balancer = {"role": "balancer", "state": "DEAD", "address": "h:1", "pid": 7}
    monitor = {"role": "monitor", "state": "SERVING", "address": "h:9", "pid": 8}
    named = r"http://e: this cluster has no live balancer \(pid 7 at h:1 is DEAD\): "
    with pytest.raises(ClusterError, match=named + f".*{remedy}"):
        servers.balancer_address("http://e", {"members": [balancer, monitor]})
    assert servers.monitor_addresses("http://e", {"members": [balancer, monitor]}) == ["h:9"]
    with pytest.raises(ClusterError, match=r"no live monitor: (start|Ray)"):
        servers.monitor_addresses("http://e", {"members": []})


REFUSAL = "2 servers started by hand: end one with `eaas drain`"


@pytest.mark.parametrize(
    ("state", "shown", "message"),
    [
        ({}, None, "nobody answers"),
        ({"refusal": REFUSAL}, status("SERVING"), f"not 2 servers: {REFUSAL}"),
        ({"wish": 8}, status("SERVING"), "a later request asked for another number"),
    ],
    ids=["a silent endpoint", "a refusal of the launcher", "a later request"],
)
def test_what_ends_the_wait(
    monkeypatch: pytest.MonkeyPatch,
    balancer: Balancer,
    state: dict[str, Any],
    shown: dict[str, Any] | None,
    message: str,
) -> None:
    monkeypatch.setattr(servers, "SILENCE_S", 0.0)
    balancer.state = pb.GetScaleResponse(**{"wish": 7} | state)
    show(monkeypatch, status("SERVING"), shown, shown)
    with pytest.raises(ClusterError, match=message):
        servers.scale(2, "http://e")


def test_an_older_refusal_is_ignored(monkeypatch: pytest.MonkeyPatch, balancer: Balancer) -> None:
    balancer.state = pb.GetScaleResponse(wish=6, refusal="an old one")
    show(monkeypatch, status("SERVING"), status("SERVING"), status("SERVING", "SERVING"))
    servers.scale(2, "http://e")
