"""Handler of /v1/messages: chat answers in the form of Anthropic's API."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from starlette.responses import Response

from eaas.generation.errors import ApiError
from frontend.errors import anthropic_body
from frontend.families.reader import Call, Reasoning
from frontend.prompts.anthropic_body import MessagesRequest
from frontend.requests.completions import ChatHandler
from frontend.requests.generation import Answer, Finish
from frontend.requests.report import Event, Report, read_arguments

__all__ = ["MessagesHandler", "MessagesReport"]

# By type of a content block: that of its deltas, and the name of their text.
_DELTAS = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}
# Clients send it back with the thinking. Nobody checks it.
_SIGNATURE = "ZWFhcw=="


class MessagesHandler(ChatHandler):
    """Handler of /v1/messages."""

    request_class = MessagesRequest
    id_prefix = "msg"

    def default_tokens(self, request: Any) -> int:
        """Return the number that the body names, for which there may be no room."""
        return int(request.max_tokens)

    async def respond(self, request: Any, answer: Answer) -> Response:
        """Return the answer to a request. Raises ApiError."""
        return await MessagesReport(request, answer, self._service.name).respond(request)


class MessagesReport(Report):
    """Collects an answer in Anthropic's message object (`Report`)."""

    def __init__(self, request: MessagesRequest, answer: Answer, model: str) -> None:
        begun = {"type": "message", "role": "assistant", "model": model, "content": []}
        super().__init__(answer, begun | {"stop_reason": None, "stop_sequence": None}, "content")
        self._most_tokens = request.max_tokens or 0
        self.whole["usage"] = self._usage()

    def _usage(self) -> dict[str, Any]:
        counts, reasoning = self._counts()
        return {
            "input_tokens": counts["prompt_tokens"],
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": reasoning},
        }

    def begin(self) -> Iterator[Event]:
        """Yield the events before the first piece."""
        yield {"type": "message_start", "message": self.whole}
        yield {"type": "ping"}

    def fail(self, error: ApiError) -> Iterator[Event]:
        """Yield the event of an answer that failed."""
        yield anthropic_body(error)

    def _begin_item(self, piece: Any) -> Iterator[Event]:
        block: dict[str, Any] = {"type": "text", "text": ""}
        if isinstance(piece, Reasoning):
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif isinstance(piece, Call):
            block = {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}}
        self._items.append(block)
        yield self._about("content_block_start", content_block=dict(block))

    def _delta(self, text: str) -> Event:
        kind, name = _DELTAS[self._items[-1]["type"]]
        return self._about("content_block_delta", delta={"type": kind, name: text})

    def _end_item(self, text: str, *, cut: bool) -> Iterator[Event]:
        block = self._items[-1]
        if block["type"] == "tool_use":
            block["input"] = read_arguments(text)
        else:
            block[block["type"]] = text
        if block["type"] == "thinking":
            block["signature"] = _SIGNATURE
            delta = {"type": "signature_delta", "signature": _SIGNATURE}
            yield self._about("content_block_delta", delta=delta)
        yield self._about("content_block_stop")

    def _finish(self, finish: Finish) -> Iterator[Event]:
        usage, reason = self._usage(), "end_turn"
        if finish.reason == "length":
            is_full = usage["output_tokens"] < self._most_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif any(block["type"] == "tool_use" for block in self._items):
            reason = "tool_use"
        elif finish.stop is not None:
            reason = "stop_sequence"
        end = {"stop_reason": reason, "stop_sequence": finish.stop}
        self.whole |= {**end, "usage": usage}
        yield {"type": "message_delta", "delta": end, "usage": usage}
        yield {"type": "message_stop"}

    def _about(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "index": len(self._items) - 1, **fields}
