"""Common part of the APIs whose answers consist of items: pieces become an object, or events about it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi.responses import JSONResponse, Response
from pydantic_core import from_json

from attention_client.serving.errors import ApiError
from attention_client.serving.families.pieces import Call, Finish, Reasoning
from attention_client.serving.prompts.bodies import GenerationRequest
from attention_client.serving.requests.answer import Answer
from attention_client.serving.requests.chat import ChatHandler
from attention_client.serving.requests.handler import EventStream
from attention_client.serving.requests.ignored import ignored_header

__all__ = ["Event", "Report", "ReportHandler", "read_arguments"]

Event = dict[str, Any]


class Report(ABC):
    """Collects an answer in an object, and makes the events of a stream of it.

    Args:
        whole: The object, which is changed.
        items: Its list of items, each with a text, reasoning or a call.
        answer: Counts the tokens.
    """

    def __init__(self, whole: dict[str, Any], items: list[dict[str, Any]], answer: Answer) -> None:
        self.whole = whole
        self._items = items
        self._answer = answer
        self._kind: type[str] | None = None  # of the open item: str or Reasoning
        self._texts: list[str] = []

    @abstractmethod
    def begin(self) -> list[Event]:
        """Return the events before the first piece."""

    @abstractmethod
    def fail(self, error: ApiError) -> list[Event]:
        """Return the events of an answer that failed."""

    def add(self, piece: Any) -> list[Event]:
        """Add a piece; return the events about it."""
        if isinstance(piece, Finish):
            return [*self._close(cut=piece.reason == "length"), *self._finish(piece)]
        if isinstance(piece, Call):
            return [*self._close(), *self._add_call(piece)]
        if not isinstance(piece, str):
            return []
        kind = Reasoning if isinstance(piece, Reasoning) else str
        events = []
        if self._kind is not kind:
            events = [*self._close(), *self._begin_text(kind)]
            self._kind = kind
        self._texts.append(piece)
        return [*events, self._add_text(kind, piece)]

    def _close(self, *, cut: bool = False) -> list[Event]:
        if self._kind is None:
            return []
        kind, text = self._kind, "".join(self._texts)
        self._kind, self._texts = None, []
        return self._end_text(kind, text, cut=cut)

    @abstractmethod
    def _begin_text(self, kind: type[str]) -> list[Event]: ...

    @abstractmethod
    def _add_text(self, kind: type[str], piece: str) -> Event: ...

    @abstractmethod
    def _end_text(self, kind: type[str], text: str, *, cut: bool) -> list[Event]: ...

    @abstractmethod
    def _add_call(self, call: Call) -> list[Event]: ...

    @abstractmethod
    def _finish(self, finish: Finish) -> list[Event]: ...

    def _counts(self) -> tuple[dict[str, Any], int]:
        """Return the counts of tokens, and those of reasoning."""
        counts: dict[str, Any] = dict(self._answer.usage)
        return counts, counts.get("completion_tokens_details", {}).get("reasoning_tokens", 0)


class ReportHandler(ChatHandler):
    """Answers with the object of a report, or with its events."""

    async def respond(self, request: GenerationRequest, answer: Answer, report: Report) -> Response:
        """Return the answer to a request. Raises ApiError."""
        headers = ignored_header(request.ignored)
        if request.stream:
            events = _stream(report, answer)
            return EventStream(events, headers=headers)
        async for _, piece in answer.pieces():
            report.add(piece)
        return JSONResponse(report.whole, headers=headers)


async def _stream(report: Report, answer: Answer) -> AsyncIterator[str]:
    yield _sent(report.begin())
    try:
        async with aclosing(answer.pieces()) as pieces:  # type: ignore[type-var]
            async for _, piece in pieces:
                if events := report.add(piece):
                    yield _sent(events)
    except ApiError as error:
        yield _sent(report.fail(error))


def _sent(events: list[Event]) -> str:
    return "".join(
        f"event: {event['type']}\ndata: {json.dumps(event, separators=(',', ':'))}\n\n"
        for event in events
    )


def read_arguments(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object; of arguments that were cut off, what is there."""
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        found = None
    return found if isinstance(found, dict) else {"arguments": arguments} if arguments else {}
