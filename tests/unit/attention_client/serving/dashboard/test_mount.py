"""The dashboard's route."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Message

from attention_client.serving.dashboard import mount
from attention_client.serving.dashboard.mount import Dashboard


def status_of(dashboard: Dashboard, path: str) -> int:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "GET", "path": path, "headers": []}
    asyncio.run(dashboard.handle(scope, receive, send))
    return int(sent[0]["status"])


def test_the_number_of_pages_is_limited_and_open_ones_continue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def open_poller() -> Any:
        raise AssertionError("no viewer")

    monkeypatch.setattr(mount, "_MOST_PAGES", 2)
    dashboard = Dashboard(open_poller)
    pages: dict[str, object] = {"a": 1}
    dashboard._pages, dashboard._open = PlainTextResponse("a page"), pages
    assert status_of(dashboard, "/") == 200
    pages["b"] = 2
    assert status_of(dashboard, "/") == 503
    assert status_of(dashboard, "/_nicegui_ws/socket.io/") == 200
    del pages["a"]
    assert status_of(dashboard, "/") == 200
