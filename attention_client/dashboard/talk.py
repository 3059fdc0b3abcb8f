"""A chat with the model that this process serves: its own HTTP handlers, without the HTTP."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attention_client.serve.accepted import AcceptedRequests
    from attention_client.serve.handler import Handler

__all__ = ["Piece", "Talk"]

_NOBODY: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class Piece:
    """Some text of an answer.

    Attributes:
        servers: Pairs of token and expert that each server computed of it; empty where that is not known.
        error: Why the answer broke off.
    """

    text: str = ""
    servers: Mapping[str, int] = field(default_factory=lambda: _NOBODY)
    error: str = ""


class Talk:
    """Asks the model.

    Args:
        chat: Of /v1/chat/completions; None where the tokenizer has no chat template.
        completion: Of /v1/completions.
        accepted: Counts this chat's requests among all others.
    """

    def __init__(
        self, chat: Handler | None, completion: Handler, accepted: AcceptedRequests
    ) -> None:
        self._accepted = accepted
        self._chat = chat
        self._completion = completion

    async def answer(self, text: str, max_tokens: int) -> AsyncIterator[Piece]:
        """The answer, as it comes. Closing the iterator ends the generation. Raises ApiError."""
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
                # Tokens that make no text yet are of the text that they make in the end.
                for name, pairs in chunk.get("servers", {}).items():
                    servers[name] = servers.get(name, 0) + pairs
                for choice in chunk["choices"]:
                    said = choice.get("text") or _said(choice.get("delta", {}))
                    if said:
                        yield Piece(said, servers)
                        servers = {}


def _said(delta: dict[str, Any]) -> str:
    return str(delta.get("content") or delta.get("reasoning_content") or "")
