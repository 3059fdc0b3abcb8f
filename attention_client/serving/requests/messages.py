"""Handler of /v1/messages: chat answers in the form of Anthropic's API."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from typing import Any

from fastapi.responses import Response

from attention_client.serving.errors import ApiError
from attention_client.serving.families.pieces import Call, Finish, Reasoning
from attention_client.serving.prompts.anthropic_body import MessagesRequest
from attention_client.serving.prompts.bodies import GenerationRequest
from attention_client.serving.requests.answer import Answer
from attention_client.serving.requests.report import Event, Report, ReportHandler, read_arguments

__all__ = ["MessagesHandler", "MessagesReport"]


class MessagesHandler(ReportHandler):
    """Handler of /v1/messages."""

    request_class = MessagesRequest
    id_prefix = "msg"

    async def handle_request(self, body: bytes, more: Callable[[int], None]) -> Response:
        """Answer one HTTP request (`Handler.handle_request`)."""
        request, answer = await self.answer(body)
        assert isinstance(request, MessagesRequest)
        del body  # may be megabytes
        report = MessagesReport(request, answer, self._service.name)
        return await self.respond(request, answer, report)

    def _budget(self, request: GenerationRequest, prompt: list[int]) -> int:
        assert isinstance(request, MessagesRequest)
        return min(request.most_tokens, self._service.max_model_len - len(prompt))


class MessagesReport(Report):
    """Collects an answer in Anthropic's message object (`Report`)."""

    def __init__(self, request: MessagesRequest, answer: Answer, model: str) -> None:
        content: list[dict[str, Any]] = []
        message = {"id": answer.id.replace("-", "_"), "type": "message", "role": "assistant"}
        end = {"stop_reason": None, "stop_sequence": None}
        super().__init__({**message, "model": model, "content": content, **end}, content, answer)
        self._request = request
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

    def begin(self) -> list[Event]:
        """Return the events before the first piece."""
        return [{"type": "message_start", "message": self.whole}, {"type": "ping"}]

    def fail(self, error: ApiError) -> list[Event]:
        """Return the events of an answer that failed."""
        return [error.anthropic_body()]

    def add(self, piece: Any) -> list[Event]:
        """Add a piece; return the events about it."""
        if isinstance(piece, Reasoning) and not self._request.shows_thinking:
            return []
        return super().add(piece)

    def _begin_text(self, kind: type[str]) -> list[Event]:
        if kind is Reasoning:
            return [self._begin({"type": "thinking", "thinking": "", "signature": ""})]
        return [self._begin({"type": "text", "text": ""})]

    def _add_text(self, kind: type[str], piece: str) -> Event:
        name = "thinking" if kind is Reasoning else "text"
        return self._about("content_block_delta", delta={"type": f"{name}_delta", name: piece})

    def _end_text(self, kind: type[str], text: str, *, cut: bool) -> list[Event]:
        block, events = self._items[-1], []
        block[block["type"]] = text
        if kind is Reasoning:
            # Clients send it back with the thinking. Nobody checks it.
            signature = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            block["signature"] = signature
            delta = {"type": "signature_delta", "signature": signature}
            events = [self._about("content_block_delta", delta=delta)]
        return [*events, self._about("content_block_stop")]

    def _add_call(self, call: Call) -> list[Event]:
        begun = self._begin({"type": "tool_use", "id": call.id, "name": call.name, "input": {}})
        self._items[-1]["input"] = read_arguments(call.arguments)
        delta = {"type": "input_json_delta", "partial_json": call.arguments}
        changed = self._about("content_block_delta", delta=delta)
        return [begun, changed, self._about("content_block_stop")]

    def _finish(self, finish: Finish) -> list[Event]:
        usage, reason = self._usage(), "end_turn"
        if finish.reason == "length":
            is_full = usage["output_tokens"] < self._request.most_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif any(block["type"] == "tool_use" for block in self._items):
            reason = "tool_use"
        elif finish.stop is not None:
            reason = "stop_sequence"
        end = {"stop_reason": reason, "stop_sequence": finish.stop}
        self.whole |= {**end, "usage": usage}
        return [{"type": "message_delta", "delta": end, "usage": usage}, {"type": "message_stop"}]

    def _begin(self, block: dict[str, Any]) -> Event:
        self._items.append(block)
        return self._about("content_block_start", content_block=dict(block))

    def _about(self, kind: str, **fields: Any) -> Event:
        return {"type": kind, "index": len(self._items) - 1, **fields}
