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
from attention_client.serving.families.pieces import Call, Finish
from attention_client.serving.prompts.bodies import GenerationRequest
from attention_client.serving.requests.answer import Answer
from attention_client.serving.requests.handler import EventStream

__all__ = ["Event", "Report", "read_arguments", "respond"]

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
        self._kind: type | None = None  # of the open item: str or Reasoning
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
            text = self._arguments(piece)
            events = [*self._close(), *self._begin_item(piece), self._delta(text)]
            return [*events, *self._end_item(text, cut=False)]
        if not isinstance(piece, str):
            return []
        events = []
        if self._kind is not type(piece):
            events = [*self._close(), *self._begin_item(piece)]
            self._kind = type(piece)
        self._texts.append(piece)
        return [*events, self._delta(piece)]

    def _close(self, *, cut: bool = False) -> list[Event]:
        if self._kind is None:
            return []
        text, self._kind, self._texts = "".join(self._texts), None, []
        return self._end_item(text, cut=cut)

    def _arguments(self, call: Call) -> str:
        return call.arguments

    @abstractmethod
    def _begin_item(self, piece: Any) -> list[Event]:
        """Append the item that begins with a text, reasoning or a call."""

    @abstractmethod
    def _delta(self, text: str) -> Event:
        """Return the event of text of the last item, or of its arguments."""

    @abstractmethod
    def _end_item(self, text: str, *, cut: bool) -> list[Event]:
        """Set the whole text of the last item; `cut`: the answer was too long."""

    @abstractmethod
    def _finish(self, finish: Finish) -> list[Event]: ...

    def _counts(self) -> tuple[dict[str, Any], int]:
        """Return the counts of tokens, and those of reasoning."""
        counts = self._answer.usage()
        return counts, counts.get("completion_tokens_details", {}).get("reasoning_tokens", 0)


async def respond(request: GenerationRequest, answer: Answer, report: Report) -> Response:
    """Return the answer to a request: a report's object, or its events. Raises ApiError."""
    headers = request.ignored_header
    if request.stream:
        return EventStream(_stream(report, answer), headers)
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
