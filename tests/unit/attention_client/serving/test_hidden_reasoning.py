"""`include_reasoning: false`: the reasoning is not delivered, whole or streamed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from attention_client.serving.families.pieces import Finish, Reasoning
from attention_client.serving.prompts.bodies import ChatRequest
from attention_client.serving.requests.chat import ChatHandler


class Answer:
    """An answer that reasons first."""

    id, usage = "a", {}

    def __len__(self) -> int:
        return 1

    async def pieces(self) -> AsyncIterator[tuple[int, Any]]:
        for piece in (Reasoning("Hm"), Reasoning("."), "Paris", Finish("stop")):
            yield 0, piece


class Handler(ChatHandler):
    """Answers each request with `Answer`."""

    async def answer(self, body: bytes) -> Any:
        return ChatRequest.read(json.loads(body)), Answer()


def ask(**fields: Any) -> str:
    async def answered() -> str:
        body = {"messages": [{"role": "user", "content": "a"}]} | fields
        service: Any = SimpleNamespace(clock=lambda: 0, name="tiny", token_texts=None)
        response = await Handler(service).handle_request(json.dumps(body).encode(), lambda _: None)
        if not fields.get("stream"):
            return bytes(response.body).decode()
        return "".join([str(part) async for part in response.body_iterator])  # type: ignore[attr-defined]

    return asyncio.run(answered())


@pytest.mark.parametrize("stream", [False, True])
def test_reasoning_is_not_delivered(stream: bool) -> None:
    assert '"reasoning_content":"Hm' in ask(stream=stream)
    hidden = ask(stream=stream, include_reasoning=False)
    assert "reasoning" not in hidden
    assert '"content":"Paris"' in hidden
    assert '"finish_reason":"stop"' in hidden
