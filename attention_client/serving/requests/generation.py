"""One sequence's generation on the HTTP event loop: the engine's tokens in, pieces of a choice out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from transformers.cli.serving.utils import ReasoningText, ToolCall, response_events_to_chunks

from attention_client.serving.generation.engine import Delivery, Engine, Work
from attention_client.serving.generation.scores import Scores
from attention_client.serving.metrics.http import ServeMetrics
from attention_client.serving.requests.detokenize import Detokenizer
from attention_client.serving.requests.form import Form
from attention_client.serving.requests.logprobs import Scored
from attention_client.serving.requests.pieces import Call, Finish, Reasoning, Served
from attention_client.serving.requests.stop import StopStrings

__all__ = ["Generation", "TextRules"]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class TextRules:
    """How the tokens of a sequence become the text of its choice.

    Attributes:
        stops: Strings that end the text.
        includes_stop: Whether the text includes the stop string or the token that ended it.
        skips_special: Whether the text has no special tokens. A parser of the answer needs them.
        echo: Text that goes before the answer: the prompt.
        continues: Whether the prompt ends with the beginning of the answer's message, which is not repeated.
        is_empty: Whether the answer has no tokens, so that only the prompt is processed.
    """

    stops: tuple[str, ...] = ()
    includes_stop: bool = False
    skips_special: bool = True
    echo: str | None = None
    continues: bool = False
    is_empty: bool = False


class Generation:
    """One sequence, from the engine's queue to the last piece of its choice.

    Without transformers' ResponseParser the answer is plain text. A form (`Form`) tells how tool calls are
    read from it.

    Attributes:
        id: The sequence's id in the engine.
        runs: Whether the sequence has started and not ended.
    """

    def __init__(
        self,
        engine: Engine,
        work: Work,
        tokenizer: Any,
        rules: TextRules,
        parser: Any | None,
        metrics: ServeMetrics,
        form: Form | None = None,
    ) -> None:
        self.id = work.id
        self._engine = engine
        self._work = work
        self._rules = rules
        # A parser finds the parts by their special tokens.
        skips_special = parser is None and rules.skips_special
        self._text = Detokenizer(tokenizer, skip_special_tokens=skips_special)
        self._stop = StopStrings(rules.stops, include=rules.includes_stop)
        self._parser = parser
        self._metrics = metrics
        self._json_calls = form.reader() if form is not None and form.reader is not None else None
        self._names_tool = form is not None and form.names_tool
        self._count = 0
        self._calls = 0
        self._echo = rules.echo
        self.runs = False
        self._begun = self._first = self._last = perf_counter()

    @property
    def usage(self) -> dict[str, int]:
        """Token counts of the sequence so far, including the end token, in OpenAI's form."""
        prompt = len(self._work.prompt)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": self._count,
            "total_tokens": prompt + self._count,
        }

    def start(self, deliver: Callable[[Delivery], None]) -> Iterator[Any]:
        """Queue the sequence; return the pieces that go before its first token. `end` must follow."""
        self.runs = True
        traces = self._metrics.traces
        if traces is not None:
            traces.begin(self._work.id, len(self._work.prompt), self._work.max_tokens)
        self._engine.submit(self._work, deliver)
        self._metrics.prompt_tokens.inc(len(self._work.prompt))
        if self._parser is None or self._rules.continues:
            return iter(())
        # What the parser found at the end of the prompt, such as the beginning of the reasoning.
        return self._of_events(self._parser.initial_events)

    def take(self, delivery: Delivery) -> Iterator[Any]:
        """Yield the pieces of a delivery: Served, Scored, str, Reasoning, Call, Finish.

        Finish ends the sequence. Raises the delivery's error.
        """
        if delivery.error is not None:
            raise delivery.error
        if delivery.servers:
            yield Served(delivery.servers)
        opening, self._echo = self._echo or "", None
        before = self._count
        text, finish = self._decode(delivery)
        if (scored := self._scored(delivery, self._count - before)) is not None:
            yield scored
        if finish is not None and not self._stop.matched:
            text += self._stop.push(self._text.flush(), search=self._may_stop())
            text += self._stop.flush()
        yield from self._parse(opening + text, final=finish is not None)
        if finish is not None:
            called = self._calls and not self._names_tool
            reason = "tool_calls" if called and finish == "stop" else finish
            self.end(reason)
            yield Finish(reason)

    def end(self, reason: str) -> None:
        """End the sequence here and in the engine; no effect before its start and after its end.

        Args:
            reason: The label of the metrics; "abort" and "error" beside the reasons of `Finish`.
        """
        if not self.runs:
            return
        self.runs = False
        self._engine.cancel(self._work.id)
        metrics = self._metrics
        if metrics.traces is not None:
            metrics.traces.end(self._work.id, reason, self._count)
        metrics.requests.labels(reason).inc()
        metrics.e2e_latency.observe(perf_counter() - self._begun)
        metrics.request_prompt_tokens.observe(len(self._work.prompt))
        metrics.request_generation_tokens.observe(self._count)
        if self._count:
            metrics.decode_time.observe(self._last - self._first)

    def _scored(self, delivery: Delivery, used: int) -> Scored | None:
        """Return the delivery's scored tokens, with those of an echoed prompt; None if there are none."""
        tokens, parts = delivery.tokens[:used], []
        if self._rules.echo is not None and delivery.prompt_scores is not None:
            tokens = self._work.prompt + tokens
            parts.append(delivery.prompt_scores)
        if delivery.scores is not None and used:
            parts.append(delivery.scores)
        return Scored(tokens, Scores.joined(parts)) if parts else None

    def _decode(self, delivery: Delivery) -> tuple[str, str | None]:
        """Return a delivery's text up to a stop string, and the finish reason if it ends the answer."""
        text = ""
        if self._rules.is_empty:
            return text, "length"
        for token in delivery.tokens:
            self._observe(delivery)
            is_end = token in self._work.end_tokens
            # A parser needs the end token, which may close a part.
            if not is_end or self._parser is not None or self._rules.includes_stop:
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
                or isinstance(piece, Reasoning)
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
            _LOG.info("%s: a part of the answer cannot be parsed: %s", self._work.id, error)
            self._parser = None

    def _of_events(self, events: list[dict[str, Any]]) -> Iterator[Any]:
        for piece in response_events_to_chunks(events):
            if isinstance(piece, ToolCall):
                yield Call(self._calls, piece.name, piece.arguments)
                self._calls += 1
            else:
                yield Reasoning(piece) if isinstance(piece, ReasoningText) else piece
