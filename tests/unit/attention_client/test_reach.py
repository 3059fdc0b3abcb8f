"""Reports about the reachability of servers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from attention_client.connections.reach import ReachBook
from eaas.types import Member, MemberState, Role, ServerReach


def server(name: str, incarnation: int = 1) -> Member:
    state = MemberState.JOINING
    return Member(name, Role.EXPERT_SERVER, 1, "h", f"{name}:1", state, incarnation=incarnation)


def connection(name: str, incarnation: int = 1, lost_reason: str | None = None) -> Any:
    return SimpleNamespace(server_id=name, incarnation=incarnation, lost_reason=lost_reason)


def test_connections_and_refusals_are_reported() -> None:
    book = ReachBook()
    assert book.report([]) == ()
    assert book.failed(server("b"), "another\nuser's")
    assert not book.failed(server("b"), "another user's")
    a, b = ServerReach("a", 1), ServerReach("b", 1, "another user's")
    assert book.report([connection("a")]) == (a, b)
    assert book.report([connection("a", lost_reason="ended")]) == (b,)
    assert book.report([connection("b")]) == (ServerReach("b", 1),)
    assert book.refusals() == {"b": "another user's"}


def test_a_lost_connection_stays_lost_until_reconnected() -> None:
    book = ReachBook()
    book.failed(server("a"), "the stream broke", lost=True)
    book.failed(server("a"), "no answer")
    assert book.report([]) == (ServerReach("a", 1, "no answer", lost=True),)
    # Another process of it was never reached.
    book.failed(server("a", 2), "no answer")
    assert book.report([]) == (ServerReach("a", 2, "no answer"),)
    book.connected("a")
    assert book.report([]) == ()


def test_former_processes_are_forgotten_and_reasons_truncated() -> None:
    book = ReachBook()
    for name in "ab":
        book.failed(server(name), name * 1000)
    book.keep({server("a").process, server("b", 2).process})
    (left,) = book.report([])
    assert left == ServerReach("a", 1, "a" * 255)
    book.failed(server("a"), "")
    assert book.report([])[0].reason
