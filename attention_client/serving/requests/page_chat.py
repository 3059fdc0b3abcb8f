"""The dashboard's chat box on the embedded engine."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from attention_client.serving.dashboard.chat_source import Piece
from attention_client.serving.families.pieces import Served
from attention_client.serving.limits import Quota
from attention_client.serving.prompts.bodies import ChatRequest
from attention_client.serving.requests.handler import Handler

__all__ = ["page_chat"]


async def page_chat(
    handler: Handler, sequences: Quota, text: str, tokens: int
) -> AsyncGenerator[Piece, None]:
    """Answer by a handler of the API (`ChatSource`). The answer counts towards the limit of requests."""
    body: dict[str, Any] = {
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_servers": True},
    }
    if handler.request_class is ChatRequest:
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text
    with sequences.share() as take:
        take(1)
        _, answer = await handler.answer(json.dumps(body).encode())
        async with aclosing(answer.pieces()) as pieces:  # type: ignore[type-var]
            async for _, piece in pieces:
                if isinstance(piece, Served):
                    yield piece.servers
                elif isinstance(piece, str):
                    yield piece
