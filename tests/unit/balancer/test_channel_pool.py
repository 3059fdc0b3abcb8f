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
def pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(lines, "channel", lambda *_: Channel())
    return ServerChannels()


def test_a_call_that_runs_is_not_ended_by_the_failure_of_another(pool: Any) -> None:
    pooled = pool.acquire("a")
    assert pool.acquire("a") is pooled
    pool.release(pooled, works=False)
    assert not pooled.channel.closed
    other = pool.acquire("a")
    assert other is not pooled
    pool.release(pooled, works=False)
    assert pooled.channel.closed
    assert not other.channel.closed
    assert pool.acquire("a") is other


def test_lines_to_servers_that_are_gone_are_closed_once_no_call_runs(pool: Any) -> None:
    idle, busy, stays = pool.acquire("idle"), pool.acquire("busy"), pool.acquire("stays")
    pool.release(idle, works=True)
    pool.release(stays, works=True)
    pool.keep({"stays"})
    assert idle.channel.closed
    assert not busy.channel.closed
    pool.release(busy, works=True)
    assert busy.channel.closed
    assert not stays.channel.closed
