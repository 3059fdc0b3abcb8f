"""One sequence's generation on the HTTP event loop: the engine's tokens in, pieces of a choice out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import groupby
from time import perf_counter
from typing import Any

from attention_client.serving.families.pieces import Call, Finish, Reasoning, Served
from attention_client.serving.families.reader import AnswerReader
from attention_client.serving.generation.engine import Delivery, Engine, Work
from attention_client.serving.metrics.http import ServeMetrics
from attention_client.serving.requests.detokenize import Detokenizer
from attention_client.serving.requests.logprobs import Scored
from attention_client.serving.requests.stop import StopStrings

__all__ = ["Generation", "TextRules"]


@dataclass(frozen=True)
class TextRules:
    """How the tokens of a sequence become the text of its choice.

    Attributes:
        stops: Strings that end the text.
        includes_stop: Whether the text includes the stop string or the token that ended it.
        skips_special: Whether the text has no special tokens.
        marked: Text with a mark, of the tokens that a reader of the answer knows (`families.markup`).
        echo: Text that goes before the answer: the prompt.
        is_empty: Whether the answer has no tokens, so that only the prompt is processed.
        names_tool: Whether the request names the function that the answer calls; then, as in OpenAI's API,
            the answer ends with the reason "stop".
        shows_reasoning: Whether the choice has the model's reasoning.
    """

    stops: tuple[str, ...] = ()
    includes_stop: bool = False
    skips_special: bool = True
    marked: Mapping[int, str] = field(default_factory=dict)
    echo: str | None = None
    is_empty: bool = False
    names_tool: bool = False
    shows_reasoning: bool = True


class Generation:
    """One sequence, from the engine's queue to the last piece of its choice.

    Attributes:
        ids: The answer's tokens so far, including the end token.
        runs: Whether the sequence has started and not ended.
    """

    def __init__(
        self,
        engine: Engine,
        work: Work,
        tokenizer: Any,
        rules: TextRules,
        reader: AnswerReader,
        metrics: ServeMetrics,
    ) -> None:
        self._engine = engine
        self._work = work
        self._rules = rules
        self._text = Detokenizer(
            tokenizer, skip_special_tokens=rules.skips_special, shown=rules.marked
        )
        self._stop = StopStrings(rules.stops, include=rules.includes_stop)
        self._reader = reader
        self._metrics = metrics
        self.ids: list[int] = []
        self._scored: list[Scored] = []
        self._untold: int | None = (
            None  # first token that `take_ids` did not return; None: nor the prompt
        )
        self._calls = False
        self._echo = rules.echo
        self.runs = False
        self._begun = self._first = self._last = perf_counter()

    @property
    def prompt(self) -> list[int]:
        """The tokens of the prompt."""
        return self._work.prompt

    @property
    def reasoning_tokens(self) -> int | None:
        """Number of tokens so far whose text is reasoning; None: answers have none."""
        return self._reader.reasoning_tokens if self._reader.may_reason else None

    def start(self, deliver: Callable[[Delivery], None]) -> None:
        """Queue the sequence. `end` must follow."""
        self.runs = True
        traces = self._metrics.traces
        if traces is not None:
            traces.begin(self._work.id, len(self._work.prompt), self._work.max_tokens)
        self._engine.submit(self._work, deliver)
        self._metrics.prompt_tokens.inc(len(self._work.prompt))

    def take(self, delivery: Delivery) -> Iterator[Any]:
        """Yield the pieces of a delivery: Served, str, Reasoning, Call, Finish.

        Finish ends the sequence. Raises the delivery's error.
        """
        if delivery.error is not None:
            raise delivery.error
        if delivery.servers:
            yield Served(delivery.servers)
        before = len(self.ids)
        pieces: list[Any] = [self._echo] if self._echo else []
        self._echo = None
        finish = self._read(delivery, pieces)
        self._score(delivery, len(self.ids) - before)
        if not self._rules.shows_reasoning:
            pieces = [piece for piece in pieces if not isinstance(piece, Reasoning)]
        yield from _joined(pieces)
        self._calls |= any(isinstance(piece, Call) for piece in pieces)
        if finish is not None:
            called = self._calls and finish == "stop" and not self._rules.names_tool
            reason = "tool_calls" if called else finish
            self.end(reason)
            yield Finish(reason, self._stop.matched)

    @property
    def log_probabilities(self) -> int:
        """Number of log-probabilities that `take_scored` will return."""
        return sum(len(part.tokens) + part.scores.top_TK.size for part in self._scored)

    def take_scored(self) -> Scored | None:
        """Return the tokens since the last call with their scores; None: there are none."""
        parts, self._scored = self._scored, []
        return Scored.joined(parts) if parts else None

    def take_ids(self) -> dict[str, list[int]]:
        """Return the ids of the tokens since the last call; at the first call those of the prompt, too."""
        prompt = {"prompt_token_ids": self._work.prompt} if self._untold is None else {}
        ids, self._untold = self.ids[self._untold or 0 :], len(self.ids)
        return prompt | {"token_ids": ids}

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
            metrics.traces.end(self._work.id, reason, len(self.ids))
        metrics.requests.labels(reason).inc()
        metrics.e2e_latency.observe(perf_counter() - self._begun)
        metrics.request_prompt_tokens.observe(len(self._work.prompt))
        metrics.request_generation_tokens.observe(len(self.ids))
        if self.ids:
            metrics.decode_time.observe(self._last - self._first)

    def _score(self, delivery: Delivery, used: int) -> None:
        """Keep the scores of the tokens of a delivery, and of an echoed prompt."""
        if self._rules.echo is not None and delivery.prompt_scores is not None:
            self._scored.append(Scored(self._work.prompt, delivery.prompt_scores))
        if delivery.scores is not None and used:
            self._scored.append(Scored(delivery.tokens[:used], delivery.scores))

    def _read(self, delivery: Delivery, pieces: list[Any]) -> str | None:
        """Add a delivery's pieces up to a stop string; return the finish reason if it ends the answer."""
        if self._rules.is_empty:
            return "length"
        for token in delivery.tokens:
            self._observe(token, delivery)
            if token in self._work.end_tokens:
                self._finish(pieces, token)
                return "stop"
            text = self._stop.push(self._text.push(token), search=self._may_stop())
            pieces += self._reader.push(text)
            if self._stop.matched or self._reader.ended:
                self._finish(pieces)
                return "stop"
        if not delivery.finished:
            return None
        self._finish(pieces)
        return "length"

    def _finish(self, pieces: list[Any], end_token: int | None = None) -> None:
        """Add what is held back after the last token, and the end token's text if the request asks for it."""
        stopped = bool(self._stop.matched)
        is_shown = end_token is not None and self._rules.includes_stop and not stopped
        marked = None if end_token is None else self._rules.marked.get(end_token)
        # Its bytes may complete a character.
        last = (
            self._text.push(end_token)
            if is_shown and marked is None and end_token is not None
            else ""
        )
        text = last + self._text.flush()
        if not stopped:
            text = self._stop.push(text, search=self._may_stop()) + self._stop.flush()
        pieces += self._reader.finish("" if stopped else text, marked or "", shown=is_shown)

    def _may_stop(self) -> bool:
        return len(self.ids) > self._work.min_tokens

    def _observe(self, token: int, delivery: Delivery) -> None:
        now = perf_counter()
        if not self.ids:
            self._metrics.time_to_first_token.observe(now - self._begun)
            self._metrics.queue_time.observe(delivery.queued_s)
            self._metrics.prefill_time.observe(max(0.0, now - self._begun - delivery.queued_s))
            self._first = now
            if self._metrics.traces is not None:
                self._metrics.traces.first_token(self._work.id)
        else:
            self._metrics.inter_token_latency.observe(now - self._last)
        self._last = now
        self.ids.append(token)
        self._metrics.generation_tokens.inc()


def _joined(pieces: list[Any]) -> Iterator[Any]:
    """Join texts of one kind that follow one another."""
    for kind, run in groupby(pieces, type):
        if issubclass(kind, str):
            yield kind("".join(run))
        else:
            yield from run
