"""One request's generation on the HTTP event loop: the engine's tokens in, pieces of the answer out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from transformers.cli.serving.utils import ReasoningText, ToolCall, response_events_to_chunks

from attention_client.serving.errors import as_api_error
from attention_client.serving.generation.engine import Delivery, Engine, Work
from attention_client.serving.metrics.http import ServeMetrics
from attention_client.serving.requests.detokenize import Detokenizer
from attention_client.serving.requests.form import Form
from attention_client.serving.requests.stop import StopStrings

__all__ = ["Call", "Finish", "Generation", "Served"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Call:
    """A tool call in the model's answer.

    Attributes:
        index: Its position among the answer's calls.
        name: The function.
        arguments: A JSON object as a string.
    """

    index: int
    name: str
    arguments: str


@dataclass(frozen=True)
class Served:
    """The expert servers that computed the next piece of text: (token, expert) pairs by server."""

    servers: Mapping[str, int]


@dataclass(frozen=True)
class Finish:
    """The end of an answer: "stop" (an end token or a stop string), "length" or "tool_calls"."""

    reason: str


class Generation:
    """One request, from the engine's queue to the last piece of its answer.

    Without transformers' ResponseParser the answer is plain text.
    """

    def __init__(
        self,
        engine: Engine,
        work: Work,
        tokenizer: Any,
        stops: Sequence[str],
        parser: Any | None,
        metrics: ServeMetrics,
        form: Form | None = None,
    ) -> None:
        self.id = work.id
        self._engine = engine
        self._work = work
        # A parser finds the parts by their special tokens.
        self._text = Detokenizer(tokenizer, skip_special_tokens=parser is None)
        self._stop = StopStrings(stops)
        self._parser = parser
        self._metrics = metrics
        self._json_calls = form.reader() if form is not None and form.reader is not None else None
        self._names_tool = form is not None and form.names_tool
        self._count = 0
        self._calls = 0
        self._begun = self._first = self._last = perf_counter()

    @property
    def usage(self) -> dict[str, int]:
        """Token counts of the request so far, including the end token, in OpenAI's form."""
        prompt = len(self._work.prompt)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._count,
            "total_tokens": prompt + self._count,
        }

    async def pieces(self) -> AsyncIterator[Any]:
        """Yield pieces of the answer: str, ReasoningText (transformers'), Call, Served, and last one Finish.

        The first step queues the request; closing the iterator cancels it. Raises ApiError.
        """
        queue: asyncio.Queue[Delivery] = asyncio.Queue()
        reason = "abort"
        traces = self._metrics.traces
        if traces is not None:
            traces.begin(self._work.id, len(self._work.prompt), self._work.max_tokens)
        try:
            self._engine.submit(self._work, queue.put_nowait)
            self._metrics.prompt_tokens.inc(len(self._work.prompt))
            for piece in self._of_events(self._parser.initial_events if self._parser else []):
                yield piece
            finish = None
            while finish is None:
                delivery = await queue.get()
                if delivery.error is not None:
                    raise delivery.error
                if delivery.servers:
                    yield Served(delivery.servers)
                text, finish = self._decode(delivery)
                if finish is not None and not self._stop.matched:
                    text += self._stop.push(self._text.flush(), search=self._may_stop())
                    text += self._stop.flush()
                for piece in self._parse(text, final=finish is not None):
                    yield piece
            called = self._calls and not self._names_tool
            reason = "tool_calls" if called and finish == "stop" else finish
            yield Finish(reason)
        except Exception as error:
            reason = "error"
            raise as_api_error(error) from error
        finally:
            self._engine.cancel(self._work.id)
            if traces is not None:
                traces.end(self._work.id, reason, self._count)
            self._metrics.requests.labels(reason).inc()
            self._metrics.e2e_latency.observe(perf_counter() - self._begun)
            self._metrics.request_prompt_tokens.observe(len(self._work.prompt))
            self._metrics.request_generation_tokens.observe(self._count)
            if self._count:
                self._metrics.decode_time.observe(self._last - self._first)

    def _decode(self, delivery: Delivery) -> tuple[str, str | None]:
        """Return a delivery's text up to a stop string, and the finish reason if it ends the answer."""
        text = ""
        for token in delivery.tokens:
            self._observe(delivery)
            is_end = token in self._work.end_tokens
            # Only a parser needs the end token: it may close a part.
            if not is_end or self._parser is not None:
                text += self._stop.push(self._text.push(token), search=self._may_stop())
            if is_end or self._stop.matched:
                return text, "stop"
        return text, "length" if delivery.finished else None

    def _may_stop(self) -> bool:
        return self._count > self._work.min_tokens

    def _observe(self, delivery: Delivery) -> None:
        now = perf_counter()
        if self._count == 0:
            self._metrics.time_to_first_token.observe(now - self._begun)
            self._metrics.queue_time.observe(delivery.queued_s)
            self._metrics.prefill_time.observe(max(0.0, now - self._begun - delivery.queued_s))
            self._first = now
            if self._metrics.traces is not None:
                self._metrics.traces.first_token(self._work.id)
        else:
            self._metrics.inter_token_latency.observe(now - self._last)
        self._last = now
        self._count += 1
        self._metrics.generation_tokens.inc()

    def _parse(self, text: str, *, final: bool) -> Iterator[Any]:
        """Yield the pieces of a text; keep the JSON of forced tool calls, and yield its calls at the end."""
        for piece in self._split(text, final=final):
            if (
                self._json_calls is None
                or not isinstance(piece, str)
                or isinstance(piece, ReasoningText)
            ):
                yield piece
            else:
                self._json_calls.push(piece)
        if final and self._json_calls is not None:
            for name, arguments in self._json_calls.calls():
                yield Call(self._calls, name, arguments)
                self._calls += 1

    def _split(self, text: str, *, final: bool) -> Iterator[Any]:
        if self._parser is None:
            if text:
                yield text
            return
        try:
            if text:
                yield from self._of_events(self._parser.feed(text))
            if final:
                yield from self._of_events(self._parser.finalize()[1])
        except (ValueError, KeyError, TypeError, RuntimeError) as error:
            # The model left a structured part, such as a tool call, incomplete or invalid.
            _LOG.info("%s: a part of the answer cannot be parsed: %s", self.id, error)
            self._parser = None

    def _of_events(self, events: list[dict[str, Any]]) -> Iterator[Any]:
        for piece in response_events_to_chunks(events):
            if isinstance(piece, ToolCall):
                yield Call(self._calls, piece.name, piece.arguments)
                self._calls += 1
            else:
                yield piece
