"""The dashboard's chat box on vLLM: it asks vLLM's own API, in the same process."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from starlette.types import ASGIApp, Scope

from attention_client.serving.dashboard.chat_source import Piece
from attention_client.vllm_server.in_process import call
from eaas.generation.errors import ApiError

__all__ = ["VllmChat"]

_JSON = ((b"content-type", b"application/json"),)
_EVENT = b"data: "


class VllmChat:
    """Answers by vLLM. It does not know which servers computed a token.

    Args:
        app: vLLM's application.
        like: Returns the scope of a request from outside; the page that holds the chat box was one.
        model: Name of the model.
        chat: The model has a chat template; if not, the message is continued.
    """

    def __init__(self, app: ASGIApp, like: Callable[[], Scope], model: str, *, chat: bool) -> None:
        self._app = app
        self._like = like
        self._model = model
        self._chat = chat

    async def answer(self, text: str, tokens: int) -> AsyncGenerator[Piece, None]:
        """Generate the text of an answer."""
        body: dict[str, Any] = {"model": self._model, "max_tokens": tokens, "stream": True}
        path = "/v1/completions"
        if self._chat:
            path = "/v1/chat/completions"
            body["messages"] = [{"role": "user", "content": text}]
        else:
            body["prompt"] = text
        asked = call(self._app, self._like(), "POST", path, _JSON, json.dumps(body).encode())
        status, pending = 200, b""
        async with aclosing(asked) as messages:
            async for message in messages:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    continue
                pending += message.get("body", b"")
                if status != 200:
                    continue
                *lines, pending = pending.split(b"\n")
                for line in lines:
                    if line.startswith(_EVENT) and (piece := _text(line.removeprefix(_EVENT))):
                        yield piece
        if status != 200:
            raise ApiError(status, _reason(pending))


def _text(data: bytes) -> str:
    if data.strip() == b"[DONE]":
        return ""
    event = json.loads(data)
    if "error" in event:
        raise ApiError(500, _reason(data))
    texts = (c.get("text") or (c.get("delta") or {}).get("content") for c in event["choices"])
    return "".join(text for text in texts if text)


def _reason(answer: bytes) -> str:
    try:
        error = json.loads(answer)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return answer.decode(errors="replace") or "no reason given"
