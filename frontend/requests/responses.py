"""Handler of /v1/responses: chat answers in the form of OpenAI's newer API, kept as history of later ones."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

from starlette.responses import Response

from eaas.generation.errors import ApiError
from frontend.families.reader import Call, Reasoning
from frontend.limits import ServeLimits
from frontend.prompts.body import load_json
from frontend.prompts.responses_body import (
    ResponsesRequest,
    call_item,
    input_items,
    sealed,
)
from frontend.requests.completions import ChatHandler
from frontend.requests.generation import Answer, Finish
from frontend.requests.report import Event, Report, read_arguments
from frontend.requests.service import More, Service

__all__ = ["ResponsesHandler", "ResponsesReport", "StoredResponses"]

_PREVIOUS = "previous_response_id"
_MOST_READ = 8  # bodies with their history that are read at the same time; each may be megabytes
# By type of an item: the prefix of its id, and the event of its text, whose last word is the text's field.
_KINDS = {
    "message": ("msg", "output_text"),
    "reasoning": ("rs", "reasoning_text"),
    "function_call": ("fc", "function_call_arguments"),
    "custom_tool_call": ("ctc", "custom_tool_call_input"),
}


class _Turn(NamedTuple):
    body: bytes  # of the request; it is read again only if it becomes history
    response: bytes
    previous: str | None

    @property
    def size(self) -> int:
        return len(self.body) + len(self.response)


class StoredResponses:
    """Responses by id. The oldest that no one uses go first when there is no more room.

    Used on the event loop only.

    Args:
        limits: How many responses, and how many bytes of requests and responses.
    """

    def __init__(self, limits: ServeLimits) -> None:
        self._limits = limits
        self._turns: dict[str, _Turn] = {}
        self._bytes = 0

    async def with_history(self, body: bytes) -> bytes:
        """Return a body whose input begins with the history that it names.

        Raises ApiError (400): a response of the history is not stored, or the history is too long.
        """
        if _PREVIOUS.encode() not in body:  # most bodies need not be read here
            return body
        fields = await asyncio.to_thread(load_json, body)
        previous, turns = fields.get(_PREVIOUS), []
        while isinstance(previous, str):
            if previous not in self._turns:
                message = _unknown(previous)
                raise ApiError.invalid(_PREVIOUS, message, "previous_response_not_found")
            turn = self._turns[previous] = self._turns.pop(previous)  # now the newest
            turns.append(turn)
            previous = turn.previous
        most = self._limits.max_body_bytes
        if sum(turn.size for turn in turns) > most:
            reason = f"The conversation is larger than {most} bytes. Begin a new one."
            raise ApiError.invalid(_PREVIOUS, reason)
        return await asyncio.to_thread(_joined, turns, fields)

    def keep(self, body: bytes, response: dict[str, Any]) -> None:
        """Store the body of a request with its response."""
        written = json.dumps(response, separators=(",", ":")).encode()
        turn = _Turn(body, written, response[_PREVIOUS])
        self._turns[response["id"]] = turn
        self._bytes += turn.size
        most, most_bytes = self._limits.max_stored_responses, self._limits.max_stored_bytes
        while len(self._turns) > most or self._bytes > most_bytes:
            self.remove(next(iter(self._turns)))

    def get(self, name: str) -> bytes:
        """Return a response as JSON. Raises ApiError (404)."""
        if name not in self._turns:
            raise ApiError(404, _unknown(name), code="response_not_found")
        return self._turns[name].response

    def remove(self, name: str) -> None:
        """Forget a response, which ends the history of later ones. Raises ApiError (404)."""
        self.get(name)
        self._bytes -= self._turns.pop(name).size


class ResponsesHandler(ChatHandler):
    """Handler of /v1/responses."""

    request_class = ResponsesRequest
    id_prefix = "resp"
    usual_tokens = sys.maxsize  # what there is room for: agents name no number

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
        if request.repeated[_PREVIOUS] and whole is body:
            raise ApiError(400, "Write the name previous_response_id without escapes.")
        keep = partial(self._stored.keep, body) if request.repeated["store"] else None
        del body, whole  # may be megabytes
        report = ResponsesReport(request, answer, self._service.name, keep)
        return await report.respond(request)


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


def _unknown(name: str) -> str:
    return f"No response {name!r} is stored here: it never was, or newer ones took its place."


def _joined(turns: list[_Turn], fields: dict[str, Any]) -> bytes:
    items: list[Any] = []
    for turn in reversed(turns):
        items += input_items(json.loads(turn.body)["input"]) + json.loads(turn.response)["output"]
    given = input_items(fields.get("input"))
    if turns and isinstance(given, list):  # else the body is refused
        fields["input"] = items + given
    return json.dumps(fields).encode()
