"""The progress of loads in `eaas up`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from eaas.cluster_snapshot.loading import Loading
from eaas.types import Member, MemberState, Role
from eaas_cli.local.loading import LoadingLines, LoadingPoller
from hand_clock import HandClock

LOADING = {"b": Loading(2 * 10**9, 10**9, 1e8), "a": Loading(2 * 10**9, 0)}


def test_lines_come_now_and_then_and_only_during_long_loads() -> None:
    lines = LoadingLines()
    printed = {second: lines.take(LOADING, float(second)) for second in range(30)}
    assert [second for second, found in printed.items() if found] == [3, 13, 23]
    assert printed[3] == [
        "a loads 0.0 of 2.0 GB (0 %)",
        "b loads 1.0 of 2.0 GB (50 %), 100.0 MB/s, 10 s left",
    ]
    # Another load also has to last before it is worth a line.
    assert lines.take({}, 30.0) == []
    assert [second for second in range(31, 50) if lines.take(LOADING, float(second))] == [34, 44]


class Monitor:
    """Answers like the monitor's connection; counts the questions."""

    def __init__(self) -> None:
        self.loaded_bytes: int | None = None
        self.asked = 0
        self.now = self

    def members(self, _timeout_s: float) -> list[Member] | None:
        self.asked += 1
        if self.loaded_bytes is None:
            return None
        return [
            Member(
                *("a", Role.EXPERT_SERVER, 7, "here", "here:1", MemberState.JOINING),
                loading_bytes=100,
                loaded_bytes=self.loaded_bytes,
            )
        ]

    def close(self) -> None:
        self.asked = -1


def test_the_monitor_is_asked_more_often_during_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monitor, cluster = Monitor(), SimpleNamespace(monitor_address="", tls=None)
    monkeypatch.setattr("eaas.membership.monitors.Monitors", lambda *_: monitor)
    clock = HandClock()

    def progress(second: int) -> Any:
        clock.now = float(second)
        return dict(poller.poll())

    poller = LoadingPoller(cluster, clock)  # type: ignore[arg-type]
    assert [progress(second) for second in range(10)] == [{}] * 10
    assert monitor.asked == 0, "the monitor is not running yet"
    cluster.monitor_address = "here:1"
    assert [progress(second) for second in range(10, 20)] == [{}] * 10
    assert monitor.asked == 4
    monitor.loaded_bytes = 10
    assert progress(22) == {"a": Loading(100, 10)}
    monitor.loaded_bytes = 30
    assert progress(23) == progress(23) == {"a": Loading(100, 30, 20.0)}
    assert monitor.asked == 6
    monitor.loaded_bytes = None
    assert progress(24) == {}
    poller.close()
    assert monitor.asked == -1
