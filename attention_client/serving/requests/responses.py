"""Handler of /v1/responses in the attention client: chat answers in the form of OpenAI's newer API."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi.responses import Response

from attention_client.serving.errors import ApiError
from attention_client.serving.families.pieces import Call, Finish, Reasoning
from attention_client.serving.prompts.responses_body import ResponsesRequest, sealed
from attention_client.serving.prompts.responses_tools import call_item
from attention_client.serving.requests.answer import Answer
from attention_client.serving.requests.report import Event, Report, ReportHandler, read_arguments
from attention_client.serving.requests.service import Service
from attention_client.serving.requests.stored import StoredResponses

__all__ = ["ResponsesHandler", "ResponsesReport"]

_MOST_READ = 8  # bodies with their history that are read at the same time; each may be megabytes


class ResponsesHandler(ReportHandler):
    """Handler of /v1/responses."""

    request_class = ResponsesRequest
    id_prefix = "resp"

    @staticmethod
    def default_tokens(of_model: int | None) -> int:
        """Return the model's default; without one, what there is room for: agents name no number."""
        return of_model or sys.maxsize

    def __init__(self, service: Service, stored: StoredResponses) -> None:
        super().__init__(service)
        self._stored = stored
        self._reading = asyncio.Semaphore(_MOST_READ)

    async def handle_request(self, body: bytes, more: Callable[[int], None]) -> Response:
        """Answer one HTTP request (`Handler.handle_request`)."""
        async with self._reading:
            whole = await self._stored.with_history(body)
            request, answer = await self.answer(whole)
        assert isinstance(request, ResponsesRequest)
        if request.repeated["previous_response_id"] and whole is body:
            raise ApiError(400, "Write the name previous_response_id without escapes.")
        keep = partial(self._stored.keep, body) if request.repeated["store"] else None
        del body, whole  # may be megabytes
        head = {
            "created_at": self._service.clock(),
            "model": self._service.name,
            "text": {"format": _form(request)},
        }
        return await self.respond(request, answer, ResponsesReport(request, head, answer, keep))


def _form(request: ResponsesRequest) -> dict[str, Any]:
    if request.response_format is None:
        return {"type": "text"}
    schema, form = request.response_format.json_schema, {"type": request.response_format.type}
    if schema is None:
        return form
    return form | {"name": schema.name, "schema": schema.definition, "strict": schema.strict}


class ResponsesReport(Report):
    """Collects an answer in OpenAI's response object (`Report`).

    Args:
        request: The request.
        head: Fields of the object.
        answer: Counts the tokens.
        keep: Called with the object at its end.
    """

    def __init__(
        self,
        request: ResponsesRequest,
        head: dict[str, Any],
        answer: Answer,
        keep: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        output: list[dict[str, Any]] = []
        begun = {"id": answer.id.replace("-", "_"), "object": "response", "status": "in_progress"}
        empty = dict.fromkeys(("error", "incomplete_details", "usage"))
        rest = {"background": False, "service_tier": "default", "top_logprobs": 0, "output": output}
        super().__init__(begun | head | empty | rest | request.repeated, output, answer)
        self._request = request
        self._keep = keep
        self._number = 0

    def begin(self) -> list[Event]:
        """Return the events before the first piece."""
        begun = ("response.created", "response.in_progress")
        return [self._event(name, response=self.whole) for name in begun]

    def fail(self, error: ApiError) -> list[Event]:
        """Return the events of an answer that failed."""
        ended = self._close(cut=True)
        self.whole["status"] = "failed"
        self.whole["error"] = {"code": "server_error", "message": error.message}
        return [*ended, self._event("response.failed", response=self.whole)]

    def _begin_text(self, kind: type[str]) -> list[Event]:
        if kind is Reasoning:
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            item = {"type": "reasoning", "summary": []}
        else:
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item = {"type": "message", "role": "assistant"}
        added = self._begin("rs" if kind is Reasoning else "msg", item | {"content": []})
        return [added, self._of_part("response.content_part.added", part=part)]

    def _add_text(self, kind: type[str], piece: str) -> Event:
        return self._of_text(kind, "delta", delta=piece)

    def _end_text(self, kind: type[str], text: str, *, cut: bool) -> list[Event]:
        item = self._items[-1]
        part: dict[str, Any] = {"type": "reasoning_text", "text": text}
        if kind is not Reasoning:
            part |= {"type": "output_text", "annotations": [], "logprobs": []}
        elif self._request.seals:
            item["encrypted_content"] = sealed(text)
        item["content"] = [part]
        return [
            self._of_text(kind, "done", text=text),
            self._of_part("response.content_part.done", part=part),
            self._end("incomplete" if cut else "completed"),
        ]

    def _add_call(self, call: Call) -> list[Event]:
        item = call_item(call.name, self.whole["tools"]) | {"call_id": call.id}
        name, kind, given = "arguments", "function_call_arguments", call.arguments
        done = {"name": item["name"]}
        if item["type"] == "custom_tool_call":
            name, kind, done = "input", "custom_tool_call_input", {}
            given = str(read_arguments(given).get("input", ""))
        added = self._begin("ctc" if name == "input" else "fc", item | {name: ""})
        item_id = self._items[-1]["id"]
        self._items[-1][name] = given
        return [
            added,
            self._of_item(f"response.{kind}.delta", item_id=item_id, delta=given),
            self._of_item(f"response.{kind}.done", item_id=item_id, **{name: given}, **done),
            self._end("completed"),
        ]

    def _finish(self, finish: Finish) -> list[Event]:
        is_cut = finish.reason == "length"
        events: list[Event] = []
        if not self._items:
            events = [*self._begin_text(str), *self._end_text(str, "", cut=is_cut)]
        status = "incomplete" if is_cut else "completed"
        counts, reasoning = self._counts()
        self.whole |= {
            "status": status,
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": reasoning},
                "total_tokens": counts["total_tokens"],
            },
        }
        if is_cut:
            self.whole["incomplete_details"] = {"reason": "max_output_tokens"}
        if self._keep is not None:
            self._keep(self.whole)
        return [*events, self._event(f"response.{status}", response=self.whole)]

    def _begin(self, prefix: str, item: dict[str, Any]) -> Event:
        item_id = f"{prefix}_{self.whole['id']}_{len(self._items)}"
        self._items.append({"id": item_id, "status": "in_progress", **item})
        return self._of_item("response.output_item.added", item=dict(self._items[-1]))

    def _end(self, status: str) -> Event:
        self._items[-1]["status"] = status
        return self._of_item("response.output_item.done", item=self._items[-1])

    def _of_text(self, kind: type[str], name: str, **fields: Any) -> Event:
        if kind is Reasoning:
            return self._of_part(f"response.reasoning_text.{name}", **fields)
        return self._of_part(f"response.output_text.{name}", **fields, logprobs=[])

    def _of_part(self, kind: str, **fields: Any) -> Event:
        item_id = self._items[-1]["id"]
        return self._of_item(kind, item_id=item_id, content_index=0, **fields)

    def _of_item(self, kind: str, **fields: Any) -> Event:
        return self._event(kind, output_index=len(self._items) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> Event:
        event = {"type": kind, **fields, "sequence_number": self._number}
        self._number += 1
        return event
