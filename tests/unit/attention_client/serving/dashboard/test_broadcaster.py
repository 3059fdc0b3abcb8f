"""One poll a second for all viewers, and none without a viewer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from attention_client.serving.dashboard import broadcaster as broadcaster_module
from attention_client.serving.dashboard.broadcaster import Broadcaster
from attention_client.serving.dashboard.sections import FAILED
from eaas.cluster_snapshot import ClusterSnapshot

PATIENCE_S = 20.0


class Poller:
    """Counts polls; may fail."""

    def __init__(self) -> None:
        self.polls = 0
        self.failing = False
        self.closed = False

    def look(self) -> ClusterSnapshot:
        self.polls += 1
        if self.failing:
            raise RuntimeError("it broke")
        return ClusterSnapshot(at=float(self.polls))

    def close(self) -> None:
        self.closed = True


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broadcaster_module, "_POLL_S", 0.1)


def test_one_poll_serves_all_viewers_and_polling_stops_without_one() -> None:
    poller, updates = Poller(), Counter[str]()

    def count(name: str) -> Callable[[], None]:
        return lambda: updates.update([name])

    async def scene() -> None:
        broadcaster = Broadcaster(lambda: poller)
        assert poller.polls == 0
        broadcaster.join("a", count("a"))
        broadcaster.join("b", count("b"))
        await until(lambda: updates["a"] >= 3)
        assert updates["a"] == updates["b"] == poller.polls or poller.polls == updates["a"] + 1
        assert broadcaster.snapshot.at >= 3
        broadcaster.leave("a")
        broadcaster.leave("a")
        broadcaster.leave("b")
        await until(lambda: broadcaster._task is None)
        polls = poller.polls
        await asyncio.sleep(0.3)
        assert poller.polls == polls
        broadcaster.join("a", count("a"))
        await until(lambda: poller.polls > polls)
        await broadcaster.close()
        assert poller.closed

    asyncio.run(scene())


def test_a_failed_poll_keeps_the_last_drawing_and_is_retried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    poller, alerts = Poller(), [""]

    async def scene() -> None:
        broadcaster = Broadcaster(lambda: poller)
        broadcaster.join("a", lambda: alerts.append(broadcaster.sections["alerts"]))
        await until(lambda: broadcaster.snapshot.at >= 1)
        drawn = broadcaster.sections["members"]
        poller.failing, before = True, poller.polls
        await until(lambda: poller.polls > before + 2)
        assert alerts[-1] == FAILED
        assert broadcaster.snapshot.at >= 1
        assert broadcaster.sections["members"] == drawn
        poller.failing = False
        await until(lambda: alerts[-1] == "[]")
        await broadcaster.close()

    asyncio.run(scene())
    assert [r.message for r in caplog.records] == ["the dashboard cannot be drawn"], "once"


def test_a_failing_viewer_does_not_affect_the_others() -> None:
    updates: list[float] = []

    def fail() -> None:
        raise RuntimeError("gone")

    async def scene() -> None:
        broadcaster = Broadcaster(Poller)
        broadcaster.join("a", fail)
        broadcaster.join("b", lambda: updates.append(broadcaster.snapshot.at))
        await until(lambda: len(updates) >= 3)
        await broadcaster.close()

    asyncio.run(scene())


def test_a_layer_is_drawn_once_for_a_poll() -> None:
    broadcaster = Broadcaster(Poller)
    assert broadcaster.placement(0) is broadcaster.placement(0)
