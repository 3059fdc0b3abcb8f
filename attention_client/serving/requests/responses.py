"""Handler of /v1/responses in the attention client: chat answers in the form of OpenAI's newer API."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from fastapi.responses import Response

from attention_client.serving.errors import ApiError
from attention_client.serving.families.pieces import Call, Finish, Reasoning
from attention_client.serving.prompts.responses_body import ResponsesRequest, sealed
from attention_client.serving.prompts.responses_tools import call_item
from attention_client.serving.requests.answer import Answer
from attention_client.serving.requests.chat import ChatHandler
from attention_client.serving.requests.report import Event, Report, read_arguments, respond
from attention_client.serving.requests.service import More, Service
from attention_client.serving.requests.stored import StoredResponses

__all__ = ["ResponsesHandler", "ResponsesReport"]

_MOST_READ = 8  # bodies with their history that are read at the same time; each may be megabytes


class _Kind(NamedTuple):
    prefix: str  # of the item's id
    event: str  # of its text
    field: str  # of its text
    in_part: dict[str, Any]  # beside a text in a part of the item's content
    in_event: dict[str, Any]  # beside a text in an event


_KINDS = {
    "message": _Kind(
        "msg", "output_text", "text", {"annotations": [], "logprobs": []}, {"logprobs": []}
    ),
    "reasoning": _Kind("rs", "reasoning_text", "text", {}, {}),
    "function_call": _Kind("fc", "function_call_arguments", "arguments", {}, {}),
    "custom_tool_call": _Kind("ctc", "custom_tool_call_input", "input", {}, {}),
}


class ResponsesHandler(ChatHandler):
    """Handler of /v1/responses."""

    request_class = ResponsesRequest
    id_prefix = "resp"

    def default_tokens(self, request: Any) -> int:
        """Return the model's default; without one, what there is room for: agents name no number."""
        return self._service.defaults.max_tokens or sys.maxsize

    def __init__(self, service: Service, stored: StoredResponses) -> None:
        super().__init__(service)
        self._stored = stored
        self._reading = asyncio.Semaphore(_MOST_READ)

    async def handle_request(self, body: bytes, more: More) -> Response:
        """Answer one HTTP request (`Handler.handle_request`)."""
        async with self._reading:
            whole = await self._stored.with_history(body)
            request, answer = await self.answer(whole)
        assert isinstance(request, ResponsesRequest)
        if request.repeated["previous_response_id"] and whole is body:
            raise ApiError(400, "Write the name previous_response_id without escapes.")
        keep = partial(self._stored.keep, body) if request.repeated["store"] else None
        del body, whole  # may be megabytes
        report = ResponsesReport(request, answer, self._service.name, keep)
        return await respond(request, answer, report)


class ResponsesReport(Report):
    """Collects an answer in OpenAI's response object (`Report`); calls `keep` with it at its end."""

    def __init__(
        self,
        request: ResponsesRequest,
        answer: Answer,
        model: str,
        keep: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        output: list[dict[str, Any]] = []
        head: dict[str, Any] = {
            "id": answer.id.replace("-", "_"),
            "object": "response",
            "status": "in_progress",
        }
        head |= {"created_at": answer.created, "model": model, "background": False}
        head |= {"error": None, "incomplete_details": None, "usage": None, "output": output}
        head |= {"service_tier": "default", "top_logprobs": 0}
        super().__init__(head | request.repeated, output, answer)
        self._seals = request.seals
        self._keep = keep
        self._number = 0

    def begin(self) -> list[Event]:
        """Return the events before the first piece."""
        return [self._event(name, response=self.whole) for name in ("created", "in_progress")]

    def fail(self, error: ApiError) -> list[Event]:
        """Return the events of an answer that failed."""
        ended = self._close(cut=True)
        self.whole["status"] = "failed"
        self.whole["error"] = {"code": "server_error", "message": error.message}
        return [*ended, self._event("failed", response=self.whole)]

    def _arguments(self, call: Call) -> str:
        if self._items[-1]["type"] == "function_call":
            return call.arguments
        return str(read_arguments(call.arguments).get("input", ""))

    def _begin_item(self, piece: Any) -> list[Event]:
        item: dict[str, Any] = {"type": "message", "role": "assistant", "content": []}
        if isinstance(piece, Call):
            item = call_item(piece.name, self.whole["tools"]) | {"call_id": piece.id}
            item[_KINDS[item["type"]].field] = ""
        elif isinstance(piece, Reasoning):
            item = {"type": "reasoning", "summary": [], "content": []}
        item_id = f"{_KINDS[item['type']].prefix}_{self.whole['id']}_{len(self._items)}"
        self._items.append({"id": item_id, "status": "in_progress", **item})
        events = [self._about("output_item.added", item=dict(self._items[-1]))]
        if "content" in item:
            events.append(self._inside("content_part.added", part=self._part("")))
        return events

    def _part(self, text: str) -> dict[str, Any]:
        kind = _KINDS[self._items[-1]["type"]]
        return {"type": kind.event, "text": text, **kind.in_part}

    def _delta(self, text: str) -> Event:
        kind = _KINDS[self._items[-1]["type"]]
        return self._inside(f"{kind.event}.delta", delta=text, **kind.in_event)

    def _end_item(self, text: str, *, cut: bool) -> list[Event]:
        item = self._items[-1]
        kind = _KINDS[item["type"]]
        name = {"name": item["name"]} if item["type"] == "function_call" else {}
        done = {kind.field: text, **name, **kind.in_event}
        events = [self._inside(f"{kind.event}.done", **done)]
        if "content" in item:
            item["content"] = [self._part(text)]
            events.append(self._inside("content_part.done", part=item["content"][0]))
        else:
            item[kind.field] = text
        if item["type"] == "reasoning" and self._seals:
            item["encrypted_content"] = sealed(text)
        item["status"] = "incomplete" if cut else "completed"
        return [*events, self._about("output_item.done", item=item)]

    def _finish(self, finish: Finish) -> list[Event]:
        is_cut = finish.reason == "length"
        events: list[Event] = []
        if not self._items:
            events = [*self._begin_item(""), *self._end_item("", cut=is_cut)]
        counts, reasoning = self._counts()
        self.whole["status"] = "incomplete" if is_cut else "completed"
        self.whole["usage"] = {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": reasoning},
            "total_tokens": counts["total_tokens"],
        }
        if is_cut:
            self.whole["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._keep is not None:
            self._keep(self.whole)
        return [*events, self._event(self.whole["status"], response=self.whole)]

    def _inside(self, kind: str, **fields: Any) -> Event:
        item = self._items[-1]
        part = {"content_index": 0} if "content" in item else {}
        return self._about(kind, item_id=item["id"], **part, **fields)

    def _about(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": f"response.{kind}", **fields, "sequence_number": self._number - 1}
