"""Handler of /v1/responses in the attention client: chat answers in the form of OpenAI's newer API.

Text and reasoning only. Answers are not stored, so there is no `previous_response_id`.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any

from fastapi.responses import JSONResponse, Response

from attention_client.serving.errors import ApiError
from attention_client.serving.prompts.responses_body import ResponsesRequest
from attention_client.serving.requests.answer import Answer
from attention_client.serving.requests.chat import ChatHandler
from attention_client.serving.requests.handler import EventStream
from attention_client.serving.requests.ignored import ignored_header
from attention_client.serving.requests.pieces import Finish, Reasoning

__all__ = ["ResponsesHandler"]


class ResponsesHandler(ChatHandler):
    """Handler of /v1/responses."""

    request_class = ResponsesRequest
    id_prefix = "resp"

    async def handle_request(self, body: bytes, more: Callable[[int], None]) -> Response:
        """Answer one HTTP request (`Handler.handle_request`)."""
        request, answer = await self.answer(body)
        assert isinstance(request, ResponsesRequest)
        del body  # may be megabytes
        report = _Report(self._response(request, answer.id), answer)
        headers = ignored_header(request.ignored)
        if request.stream:
            events = _events(report, answer)
            return EventStream(events, media_type="text/event-stream", headers=headers)
        async for _, piece in answer.pieces():
            report.add(piece)
        return JSONResponse(report.response, headers=headers)

    def _response(self, request: ResponsesRequest, answer_id: str) -> dict[str, Any]:
        constraint = request.constraint
        kind = "text" if request.response_format is None else request.response_format.type
        form: dict[str, Any] = {"type": kind}
        if constraint is not None and request.response_format is not None:
            schema = request.response_format.json_schema
            if schema is not None:
                form |= {"name": schema.name, "schema": schema.definition, "strict": schema.strict}
        return {
            "id": answer_id.replace("-", "_"),
            "object": "response",
            "created_at": self._service.clock(),
            "status": "in_progress",
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "max_output_tokens": request.max_completion_tokens,
            "model": self._service.name,
            "output": [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "store": False,
            "temperature": request.temperature,
            "text": {"format": form},
            "tool_choice": "auto",
            "tools": [],
            "top_p": request.top_p,
            "truncation": "disabled",
            "usage": None,
        }


class _Report:
    """Collects the pieces of an answer in the response object, and makes the events of a stream of them.

    Args:
        response: The response object, which is changed.
        answer: Counts the tokens.
    """

    def __init__(self, response: dict[str, Any], answer: Answer) -> None:
        self.response = response
        self._answer = answer
        self._item: dict[str, Any] | None = None

    def add(self, piece: Any) -> list[dict[str, Any]]:
        """Add a piece; return the events about it."""
        if isinstance(piece, Finish):
            return self._finish(piece.reason)
        if not isinstance(piece, str):
            return []
        kind = "reasoning" if isinstance(piece, Reasoning) else "message"
        events = []
        if self._item is None or self._item["type"] != kind:
            events = [*self._end_item(), *self._begin_item(kind)]
        assert self._item is not None
        self._item["content"][0]["text"] += piece
        return [*events, self._of_text("delta", delta=piece)]

    def fail(self, error: ApiError) -> list[dict[str, Any]]:
        """Return the events of an answer that failed."""
        self.response["status"] = "failed"
        self.response["error"] = {"code": "server_error", "message": error.message}
        return [{"type": "response.failed", "response": self.response}]

    def _begin_item(self, kind: str) -> list[dict[str, Any]]:
        output = self.response["output"]
        item_id = f"{'rs' if kind == 'reasoning' else 'msg'}_{self.response['id']}_{len(output)}"
        part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
        item = {"id": item_id, "type": kind, "status": "in_progress", "content": [part]}
        if kind == "message":
            item["role"] = "assistant"
            part |= {"type": "output_text", "annotations": [], "logprobs": []}
        else:
            item["summary"] = []
        output.append(item)
        self._item = item
        return [
            self._of_item("output_item.added", item=item | {"content": []}),
            self._of_part("content_part.added", part=dict(part)),
        ]

    def _end_item(self, status: str = "completed") -> list[dict[str, Any]]:
        if self._item is None:
            return []
        self._item["status"] = status
        part = self._item["content"][0]
        events = [
            self._of_text("done", text=part["text"]),
            self._of_part("content_part.done", part=part),
            self._of_item("output_item.done", item=self._item),
        ]
        self._item = None
        return events

    def _finish(self, reason: str) -> list[dict[str, Any]]:
        events = [] if self.response["output"] else self._begin_item("message")
        status = "incomplete" if reason == "length" else "completed"
        events += self._end_item(status)
        counts = self._answer.usage
        self.response |= {
            "status": status,
            "usage": {
                "input_tokens": counts["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": counts["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counts["total_tokens"],
            },
        }
        if reason == "length":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        return [*events, {"type": f"response.{status}", "response": self.response}]

    def _of_item(self, kind: str, **fields: Any) -> dict[str, Any]:
        index = len(self.response["output"]) - 1
        return {"type": f"response.{kind}", "output_index": index, **fields}

    def _of_part(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self._item is not None
        return self._of_item(kind, item_id=self._item["id"], content_index=0, **fields)

    def _of_text(self, kind: str, **fields: Any) -> dict[str, Any]:
        assert self._item is not None
        is_message = self._item["type"] == "message"
        fields |= {"logprobs": []} if is_message else {}
        name = "output_text" if is_message else "reasoning_text"
        return self._of_part(f"{name}.{kind}", **fields)


async def _events(report: _Report, answer: Answer) -> AsyncIterator[str]:
    number = 0

    def sent(events: list[dict[str, Any]]) -> str:
        nonlocal number
        text = ""
        for event in events:
            data = json.dumps(event | {"sequence_number": number}, separators=(",", ":"))
            text += f"event: {event['type']}\ndata: {data}\n\n"
            number += 1
        return text

    begun = ("response.created", "response.in_progress")
    yield sent([{"type": name, "response": report.response} for name in begun])
    try:
        async with aclosing(answer.pieces()) as pieces:  # type: ignore[type-var]
            async for _, piece in pieces:
                if events := report.add(piece):
                    yield sent(events)
    except ApiError as error:
        yield sent(report.fail(error))
