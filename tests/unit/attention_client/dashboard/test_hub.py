"""One look a second for all viewers, and none without."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from attention_client.dashboard import hub as hub_module
from attention_client.dashboard.hub import Hub
from attention_client.dashboard.sections import FAILED
from eaas.facts import Facts

PATIENCE_S = 20.0


class Counter:
    """Counts looks; may fail."""

    def __init__(self) -> None:
        self.looks = 0
        self.failing = False
        self.closed = False

    def look(self) -> Facts:
        self.looks += 1
        if self.failing:
            raise RuntimeError("it broke")
        return Facts(at=float(self.looks))

    def close(self) -> None:
        self.closed = True


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "_LOOK_S", 0.1)


def test_nobody_looks_without_a_viewer_and_one_look_is_for_all() -> None:
    counter, told = Counter(), {"a": 0, "b": 0}

    def tell(name: str) -> Callable[[], None]:
        def told_once() -> None:
            told[name] += 1

        return told_once

    async def scene() -> None:
        hub = Hub(lambda: counter)
        assert counter.looks == 0
        hub.join("a", tell("a"))
        hub.join("b", tell("b"))
        await until(lambda: told["a"] >= 3)
        assert told["a"] == told["b"] == counter.looks or counter.looks == told["a"] + 1
        assert hub.facts.at >= 3
        hub.leave("a")
        hub.leave("a")
        hub.leave("b")
        await until(lambda: hub._task is None)
        looks = counter.looks
        await asyncio.sleep(0.3)
        assert counter.looks == looks, "nobody looks any more"
        hub.join("a", tell("a"))
        await until(lambda: counter.looks > looks)
        await hub.close()
        assert counter.closed

    asyncio.run(scene())


def test_a_failed_look_is_shown_with_what_was_drawn_and_the_next_one_is_tried(
    caplog: pytest.LogCaptureFixture,
) -> None:
    counter, alerts = Counter(), [""]

    async def scene() -> None:
        hub = Hub(lambda: counter)
        hub.join("a", lambda: alerts.append(hub.sections["alerts"]))
        await until(lambda: hub.facts.at >= 1)
        drawn = hub.sections["members"]
        counter.failing, before = True, counter.looks
        await until(lambda: counter.looks > before + 2)
        assert alerts[-1] == FAILED
        assert hub.facts.at >= 1
        assert hub.sections["members"] == drawn
        counter.failing = False
        await until(lambda: alerts[-1] == "[]")
        await hub.close()

    asyncio.run(scene())
    assert [r.message for r in caplog.records] == ["the dashboard cannot be drawn"], "once"


def test_a_viewer_that_cannot_be_shown_it_keeps_it_from_nobody_else() -> None:
    counter, told = Counter(), []

    def fail() -> None:
        raise RuntimeError("gone")

    async def scene() -> None:
        hub = Hub(lambda: counter)
        hub.join("a", fail)
        hub.join("b", lambda: told.append(hub.facts.at))
        await until(lambda: len(told) >= 3)
        await hub.close()

    asyncio.run(scene())


def test_a_layer_is_drawn_once_for_a_look() -> None:
    hub = Hub(Counter)
    assert hub.placement(0) is hub.placement(0)
