"""Sends chat requests to this process's own HTTP handlers, without HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attention_client.serving.accepted import AcceptedRequests
    from attention_client.serving.requests.handler import Handler

__all__ = ["ChatClient", "Piece"]


@dataclass(frozen=True)
class Piece:
    """A piece of an answer.

    Attributes:
        text: Its text.
        servers: (token, expert) pairs by server; empty: unknown.
        error: Why the answer failed; empty: no error.
    """

    text: str = ""
    servers: Mapping[str, int] = field(default_factory=dict)
    error: str = ""


class ChatClient:
    """Sends requests to the model.

    Args:
        chat: The handler of /v1/chat/completions; None: the tokenizer has no chat template.
        completion: The handler of /v1/completions.
        accepted: Counts the chat's requests together with all others.
    """

    def __init__(
        self, chat: Handler | None, completion: Handler, accepted: AcceptedRequests
    ) -> None:
        self._accepted = accepted
        self._chat = chat
        self._completion = completion

    async def answer(self, text: str, max_tokens: int) -> AsyncIterator[Piece]:
        """Yield the answer as it is generated. Closing the iterator cancels it. Raises ApiError."""
        body: dict[str, Any] = {
            "stream": True,
            "max_tokens": max_tokens,
            "stream_options": {"include_servers": True},
        }
        if self._chat is None:
            handler, body["prompt"] = self._completion, text
        else:
            handler, body["messages"] = self._chat, [{"role": "user", "content": text}]
        with self._accepted.accept():
            response = await handler.handle_request(json.dumps(body).encode())
            async with aclosing(self._pieces(response)) as pieces:  # type: ignore[type-var]
                async for piece in pieces:
                    yield piece

    async def _pieces(self, response: Any) -> AsyncIterator[Piece]:
        servers: dict[str, int] = {}
        async with aclosing(response.body_iterator) as events:
            async for event in events:
                data = event.removeprefix("data: ").strip()
                if data == "[DONE]":
                    return
                chunk = json.loads(data)
                if "error" in chunk:
                    yield Piece(error=str(chunk["error"]["message"]))
                    return
                # Tokens without text yet belong to the next text.
                for name, pairs in chunk.get("servers", {}).items():
                    servers[name] = servers.get(name, 0) + pairs
                for choice in chunk["choices"]:
                    delta = choice.get("delta", choice)
                    text = (
                        delta.get("text") or delta.get("content") or delta.get("reasoning_content")
                    )
                    if text:
                        yield Piece(text, servers)
                        servers = {}
