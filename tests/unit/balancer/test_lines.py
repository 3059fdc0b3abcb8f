"""Connections to servers are used again, and let go of when nobody needs them."""

from __future__ import annotations

from typing import Any

import pytest

from balancer import lines
from balancer.lines import ServerLines


class Channel:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(lines, "channel", lambda *_: Channel())
    return ServerLines()


def test_calls_one_after_another_and_at_once_take_the_same(kept: Any) -> None:
    first = kept.take("a")
    assert kept.take("a") is first
    kept.give_back(first, works=True)
    kept.give_back(first, works=True)
    assert kept.take("a") is first
    assert kept.take("b") is not first
    assert not first.channel.closed


def test_after_a_failure_the_next_call_connects_anew(kept: Any) -> None:
    failed = kept.take("a")
    kept.give_back(failed, works=False)
    assert failed.channel.closed
    assert kept.take("a") is not failed


def test_a_call_that_runs_is_not_ended_by_the_failure_of_another(kept: Any) -> None:
    line = kept.take("a")
    assert kept.take("a") is line
    kept.give_back(line, works=False)
    assert not line.channel.closed
    other = kept.take("a")
    assert other is not line
    kept.give_back(line, works=False)
    assert line.channel.closed
    assert not other.channel.closed
    assert kept.take("a") is other


def test_lines_to_servers_that_are_gone_are_closed_once_no_call_runs(kept: Any) -> None:
    idle, busy, stays = kept.take("idle"), kept.take("busy"), kept.take("stays")
    kept.give_back(idle, works=True)
    kept.give_back(stays, works=True)
    kept.keep({"stays"})
    assert idle.channel.closed
    assert not busy.channel.closed
    kept.give_back(busy, works=True)
    assert busy.channel.closed
    assert not stays.channel.closed


def test_the_end_closes_all(kept: Any) -> None:
    idle, busy, left = kept.take("idle"), kept.take("busy"), kept.take("left")
    kept.give_back(idle, works=True)
    kept.keep({"idle", "busy"})
    kept.close()
    assert all(line.channel.closed for line in (idle, busy, left))
