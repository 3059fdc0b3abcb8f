"""`eaas scale` waits for what it asked for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import eaas.balancer_calls
from eaas.cli import servers
from eaas.errors import ClusterError


def status(*states: str) -> dict[str, Any]:
    balancer = {"id": "b", "role": "balancer", "state": "SERVING", "address": "h:1", "experts": 0}
    members = [
        {"id": f"s{i}", "role": "expert-server", "state": state, "address": "h:2", "experts": 0}
        for i, state in enumerate(states)
    ]
    return {"members": [balancer, *members]}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    calls: list[tuple[object, ...]] = []
    monkeypatch.setattr(eaas.balancer_calls, "scale_servers", lambda *call: calls.append(call))
    monkeypatch.setattr(servers, "_LOOK_S", 0.0)
    return calls


def show(monkeypatch: pytest.MonkeyPatch, *documents: dict[str, Any] | None) -> Iterator[Any]:
    left = iter(documents)

    def fetch(endpoint: str, _key_file: object) -> dict[str, Any]:
        document = next(left)
        if document is None:
            raise ClusterError("nobody answers")
        return document

    monkeypatch.setattr(servers, "fetch_status", fetch)
    return left


def test_it_ends_with_servers_that_hold_nothing_and_survives_a_look_that_failed(
    monkeypatch: pytest.MonkeyPatch, asked: list[tuple[object, ...]]
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
    assert asked == [("h:1", 2, None)]
    assert next(left, "all were looked at") == "all were looked at"


def test_it_ends_where_nobody_answers_any_more(
    monkeypatch: pytest.MonkeyPatch, asked: list[tuple[object, ...]]
) -> None:
    monkeypatch.setattr(servers, "_PATIENCE_S", 0.0)
    show(monkeypatch, status("SERVING"), None, None)
    with pytest.raises(ClusterError, match="nobody answers"):
        servers.scale(2, "http://e")
