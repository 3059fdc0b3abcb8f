"""Handler of /v1/responses in the attention client: chat answers in the form of OpenAI's newer API."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from starlette.responses import Response

from attention_client.serving.families.pieces import Call, Finish, Reasoning
from attention_client.serving.prompts.responses_body import ResponsesRequest, call_item, sealed
from attention_client.serving.requests.completions import ChatHandler
from attention_client.serving.requests.generation import Answer
from attention_client.serving.requests.report import Event, Report, read_arguments, respond
from attention_client.serving.requests.service import More, Service
from attention_client.serving.requests.stored import StoredResponses
from eaas.generation.errors import ApiError

__all__ = ["ResponsesHandler", "ResponsesReport"]

_MOST_READ = 8  # bodies with their history that are read at the same time; each may be megabytes


# By type of an item: the prefix of its id, and the event of its text, whose last word is the text's field.
_KINDS = {
    "message": ("msg", "output_text"),
    "reasoning": ("rs", "reasoning_text"),
    "function_call": ("fc", "function_call_arguments"),
    "custom_tool_call": ("ctc", "custom_tool_call_input"),
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
        begun = {"object": "response", "created_at": answer.created, "status": "in_progress"}
        begun |= dict.fromkeys(("error", "incomplete_details", "usage"))
        begun |= {"background": False, "service_tier": "default", "top_logprobs": 0, "output": []}
        super().__init__(answer, begun | {"model": model} | request.repeated, "output")
        self._seals = request.seals
        self._keep = keep
        self._number = 0

    def begin(self) -> Iterator[Event]:
        """Yield the events before the first piece."""
        yield self._event("created", response=self.whole)
        yield self._event("in_progress", response=self.whole)

    def fail(self, error: ApiError) -> Iterator[Event]:
        """Yield the events of an answer that failed."""
        yield from self._close(cut=True)
        self.whole["status"] = "failed"
        self.whole["error"] = {"code": "server_error", "message": error.message}
        yield self._event("failed", response=self.whole)

    def _arguments(self, call: Call) -> str:
        if self._items[-1]["type"] == "function_call":
            return call.arguments
        return str(read_arguments(call.arguments).get("input", ""))

    def _begin_item(self, piece: Any) -> Iterator[Event]:
        item: dict[str, Any] = {"type": "message", "role": "assistant", "content": []}
        if isinstance(piece, Call):
            item = call_item(piece.name, self.whole["tools"]) | {"call_id": piece.id}
        elif isinstance(piece, Reasoning):
            item = {"type": "reasoning", "summary": [], "content": []}
        prefix, self._event_name = _KINDS[item["type"]]
        self._field = self._event_name.rpartition("_")[2]
        self._more: dict[str, Any] = {"logprobs": []} if prefix == "msg" else {}
        item |= {"id": f"{prefix}_{self.whole['id']}_{len(self._items)}", "status": "in_progress"}
        if "content" not in item:
            item[self._field] = ""
        self._items.append(item)
        yield self._about("output_item.added", item=dict(item))
        if "content" in item:
            yield self._inside("content_part.added", part=self._part(""))

    def _part(self, text: str) -> dict[str, Any]:
        more = self._more | {"annotations": []} if self._more else {}
        return {"type": self._event_name, "text": text, **more}

    def _delta(self, text: str) -> Event:
        return self._inside(f"{self._event_name}.delta", delta=text, **self._more)

    def _end_item(self, text: str, *, cut: bool) -> Iterator[Event]:
        item = self._items[-1]
        done = {self._field: text, **self._more}
        if item["type"] == "function_call":
            done["name"] = item["name"]
        yield self._inside(f"{self._event_name}.done", **done)
        if "content" in item:
            item["content"] = [self._part(text)]
            yield self._inside("content_part.done", part=item["content"][0])
        else:
            item[self._field] = text
        if item["type"] == "reasoning" and self._seals:
            item["encrypted_content"] = sealed(text)
        item["status"] = "incomplete" if cut else "completed"
        yield self._about("output_item.done", item=item)

    def _finish(self, finish: Finish) -> Iterator[Event]:
        is_cut = finish.reason == "length"
        if not self._items:
            yield from self._begin_item("")
            yield from self._end_item("", cut=is_cut)
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
        yield self._event(self.whole["status"], response=self.whole)

    def _inside(self, kind: str, **fields: Any) -> Event:
        item = self._items[-1]
        part = {"content_index": 0} if "content" in item else {}
        return self._about(kind, item_id=item["id"], **part, **fields)

    def _about(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        self._number += 1
        return {"type": f"response.{kind}", **fields, "sequence_number": self._number - 1}
