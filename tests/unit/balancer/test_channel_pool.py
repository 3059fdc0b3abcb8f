"""Connections to servers are reused, and closed when unused."""

from __future__ import annotations

from typing import Any

import pytest

from balancer import channel_pool as lines
from balancer.channel_pool import ServerChannels


class Channel:
    def __init__(self) -> None:
        self.closed = False

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(lines, "channel", lambda *_: Channel())
    return ServerChannels()


def test_calls_one_after_another_and_at_once_take_the_same(kept: Any) -> None:
    first = kept.acquire("a")
    assert kept.acquire("a") is first
    kept.release(first, works=True)
    kept.release(first, works=True)
    assert kept.acquire("a") is first
    assert kept.acquire("b") is not first
    assert not first.channel.closed


def test_after_a_failure_the_next_call_connects_anew(kept: Any) -> None:
    failed = kept.acquire("a")
    kept.release(failed, works=False)
    assert failed.channel.closed
    assert kept.acquire("a") is not failed


def test_a_call_that_runs_is_not_ended_by_the_failure_of_another(kept: Any) -> None:
    pooled = kept.acquire("a")
    assert kept.acquire("a") is pooled
    kept.release(pooled, works=False)
    assert not pooled.channel.closed
    other = kept.acquire("a")
    assert other is not pooled
    kept.release(pooled, works=False)
    assert pooled.channel.closed
    assert not other.channel.closed
    assert kept.acquire("a") is other


def test_lines_to_servers_that_are_gone_are_closed_once_no_call_runs(kept: Any) -> None:
    idle, busy, stays = kept.acquire("idle"), kept.acquire("busy"), kept.acquire("stays")
    kept.release(idle, works=True)
    kept.release(stays, works=True)
    kept.keep({"stays"})
    assert idle.channel.closed
    assert not busy.channel.closed
    kept.release(busy, works=True)
    assert busy.channel.closed
    assert not stays.channel.closed


def test_the_end_closes_all(kept: Any) -> None:
    idle, busy, left = kept.acquire("idle"), kept.acquire("busy"), kept.acquire("left")
    kept.release(idle, works=True)
    kept.keep({"idle", "busy"})
    kept.close()
    assert all(pooled.channel.closed for pooled in (idle, busy, left))
