"""Common part of the APIs whose answers consist of items: pieces become an object, or events about it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing
from typing import Any

from pydantic_core import from_json
from starlette.responses import JSONResponse, Response

from eaas.generation.errors import ApiError
from frontend.families.reader import Call
from frontend.prompts.bodies import GenerationRequest
from frontend.requests.completions import EventStream
from frontend.requests.generation import Answer, Finish

__all__ = ["Event", "Report", "read_arguments"]

Event = dict[str, Any]


class Report(ABC):
    """Collects an answer in an object, and makes the events of a stream of it.

    Args:
        answer: Has the answer's id and counts its tokens.
        whole: The object at the beginning, without the id.
        items: Its field with the list of items, each with a text, reasoning or a call.
    """

    def __init__(self, answer: Answer, whole: dict[str, Any], items: str) -> None:
        self.whole = {"id": answer.id.replace("-", "_"), **whole}
        self._items: list[dict[str, Any]] = self.whole[items]
        self._answer = answer
        self._kind: type | None = None  # of the open item: str, Reasoning or Call
        self._texts: list[str] = []

    async def respond(self, request: GenerationRequest) -> Response:
        """Return the answer to a request: the object, or its events. Raises ApiError."""
        if request.stream:
            return EventStream(self._answer, self._stream(), request.ignored_header)
        async for _, piece in self._answer.pieces():
            for _event in self.add(piece):
                pass
        return JSONResponse(self.whole, headers=request.ignored_header)

    async def _stream(self) -> AsyncIterator[str]:
        yield _sent(self.begin())
        try:
            async with aclosing(self._answer.pieces()) as pieces:  # type: ignore[type-var]
                async for _, piece in pieces:
                    if events := _sent(self.add(piece)):
                        yield events
        except ApiError as error:
            yield _sent(self.fail(error))

    @abstractmethod
    def begin(self) -> Iterator[Event]:
        """Yield the events before the first piece."""

    @abstractmethod
    def fail(self, error: ApiError) -> Iterator[Event]:
        """Yield the events of an answer that failed."""

    def add(self, piece: Any) -> Iterator[Event]:
        """Add a piece; yield the events about it."""
        if isinstance(piece, Finish):
            yield from self._close(cut=piece.reason == "length")
            yield from self._finish(piece)
        elif isinstance(piece, (str, Call)):
            if isinstance(piece, Call) or self._kind is not type(piece):
                yield from self._close()
                yield from self._begin_item(piece)
                self._kind = type(piece)
            text = self._arguments(piece) if isinstance(piece, Call) else piece
            self._texts.append(text)
            yield self._delta(text)

    def _close(self, *, cut: bool = False) -> Iterator[Event]:
        if self._kind is not None:
            text, self._kind, self._texts = "".join(self._texts), None, []
            yield from self._end_item(text, cut=cut)

    def _arguments(self, call: Call) -> str:
        return call.arguments

    @abstractmethod
    def _begin_item(self, piece: Any) -> Iterator[Event]:
        """Append the item that begins with a text, reasoning or a call."""

    @abstractmethod
    def _delta(self, text: str) -> Event:
        """Return the event of text of the last item, or of its arguments."""

    @abstractmethod
    def _end_item(self, text: str, *, cut: bool) -> Iterator[Event]:
        """Set the whole text of the last item; `cut`: the answer was too long."""

    @abstractmethod
    def _finish(self, finish: Finish) -> Iterator[Event]: ...

    def _counts(self) -> tuple[dict[str, Any], int]:
        """Return the counts of tokens, and those of reasoning."""
        counts = self._answer.usage()
        return counts, counts.get("completion_tokens_details", {}).get("reasoning_tokens", 0)


def _sent(events: Iterable[Event]) -> str:
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
