"""The answer to one request on the HTTP event loop: the engine's tokens in, pieces of its choices out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from time import perf_counter
from typing import Any

from eaas.generation.errors import as_api_error
from eaas.generation.work import Delivery, Work
from frontend.families.reader import Call, Reasoning
from frontend.prompts.bodies import GenerationRequest
from frontend.requests.form import Form
from frontend.requests.logprobs import Scored
from frontend.requests.service import Service
from frontend.requests.text import Detokenizer, StopStrings

__all__ = ["Answer", "Finish", "Generation", "Served"]


@dataclass(frozen=True)
class Served:
    """The expert servers that computed the next piece of text: (token, expert) pairs by server."""

    servers: Mapping[str, int]


@dataclass(frozen=True)
class Finish:
    """The end of an answer: "stop" (an end token or a stop string), "length" or "tool_calls".

    Attributes:
        reason: One of these.
        stop: The request's stop string that ended the answer; None: none did.
    """

    reason: str
    stop: str | None = None


class Generation:
    """One sequence, from the engine's queue to the last piece of its choice.

    Args:
        service: The model, its engine and the metrics.
        request: Its settings make the tokens text.
        form: How the answer is read.
        work: The sequence.
        echo: Text that goes before the answer: the prompt; None: no text.

    Attributes:
        length: Tokens of the answer so far, with the end token.
        runs: Whether the sequence has started and not ended.
    """

    def __init__(
        self,
        service: Service,
        request: GenerationRequest,
        form: Form,
        work: Work,
        echo: str | None = None,
    ) -> None:
        self._engine, self._metrics = service.engine, service.metrics
        self._request, self._form = request, form
        self._work = work
        # Text with a mark, of the tokens that the reader knows.
        self._marked = form.markup.tokens
        self._text = Detokenizer(
            service.tokenizer, skip_special_tokens=request.skips_special, shown=self._marked
        )
        self._includes_stop = bool(request.include_stop_str_in_output)
        self._stop = StopStrings(request.stop, include=self._includes_stop)
        self._reader = form.reader()
        self.length = 0
        self._scored: list[Scored] = []
        # What `take_ids` did not return yet, if the request asks for ids.
        self._untold: dict[str, list[int]] = {"token_ids": []}
        if request.return_token_ids:
            self._untold = {"prompt_token_ids": work.prompt, "token_ids": []}
        self._calls = False
        self._echo = echo
        self.runs = False
        self._begun = self._first = self._last = perf_counter()
        self._queued_s = 0.0

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return self._work.prompt_length

    @property
    def reasoning_tokens(self) -> int | None:
        """Number of tokens so far whose text is reasoning; None: answers have none."""
        return None if self._form.markup.reasoning is None else self._reader.reasoning_tokens

    def start(self, deliver: Callable[[Delivery], None]) -> None:
        """Queue the sequence. `end` must follow."""
        self.runs = True
        work = self._work
        trace = self._metrics.traces.begin(work.id, work.prompt_length, work.max_tokens)
        self._work = replace(work, trace=trace)
        self._engine.submit(self._work, deliver)
        self._metrics.prompt_tokens.inc(self._work.prompt_length)

    def take(self, delivery: Delivery) -> Iterator[Any]:
        """Yield the pieces of a delivery: Served, str, Reasoning, Call, Finish.

        Finish ends the sequence. Raises the delivery's error.
        """
        if delivery.error is not None:
            raise delivery.error
        self._queued_s += delivery.queued_s
        if not delivery.tokens and not delivery.finished:
            return  # the sequence begins
        if delivery.servers:
            yield Served(delivery.servers)
        before = self.length
        pieces: list[Any] = [self._echo] if self._echo else []
        self._echo = None
        finish = self._read(delivery, pieces)
        self._score(delivery, self.length - before)
        if not self._form.shows_reasoning:
            pieces = [piece for piece in pieces if not isinstance(piece, Reasoning)]
        yield from _joined(pieces)
        self._calls |= any(isinstance(piece, Call) for piece in pieces)
        if finish is not None:
            called = self._calls and finish == "stop" and not self._form.names_tool
            reason = "tool_calls" if called else finish
            self.end(reason)
            # A stop string of the token that ends the only call comes after it.
            yield Finish(reason, None if self._reader.ended else self._stop.matched)

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
        untold, self._untold = self._untold, {"token_ids": []}
        return untold

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
        metrics.traces.end(self._work.id, reason, self.length)
        metrics.requests.labels(reason).inc()
        metrics.e2e_latency.observe(perf_counter() - self._begun)
        metrics.request_prompt_tokens.observe(self._work.prompt_length)
        metrics.request_generation_tokens.observe(self.length)
        if self.length:
            metrics.decode_time.observe(self._last - self._first)

    def _score(self, delivery: Delivery, used: int) -> None:
        """Keep the scores of the tokens of a delivery, and of an echoed prompt."""
        if delivery.prompt_scores is not None:
            self._scored.append(Scored(self._work.prompt, delivery.prompt_scores))
        if delivery.scores is not None and used:
            self._scored.append(Scored(delivery.tokens[:used], delivery.scores))

    def _read(self, delivery: Delivery, pieces: list[Any]) -> str | None:
        """Add a delivery's pieces up to a stop string; return the finish reason if it ends the answer."""
        if self._request.token_budget == 0:
            return "length"
        for token in delivery.tokens:
            self._observe(token)
            if token in self._work.end_tokens:
                self._finish(pieces, token)
                return "stop"
            pieces += self._reader.push(self._searched(self._text.push(token)))
            if self._stop.matched or self._reader.ended:
                self._finish(pieces)
                return "stop"
        if not delivery.finished:
            return None
        self._finish(pieces)
        return "stop" if self._stop.matched else "length"

    def _finish(self, pieces: list[Any], end_token: int | None = None) -> None:
        """Add what is held back after the last token, and the end token's text if the request asks for it."""
        if self._stop.matched:
            pieces += self._reader.finish("")
            return
        text, marked = "", None if end_token is None else self._marked.get(end_token)
        if end_token is not None and self._includes_stop and marked is None:
            text = self._text.push(end_token)  # its bytes may complete a character
        text = self._searched(text + self._text.flush()) + self._stop.flush()
        pieces += self._reader.finish(text, marked or "", shown=self._includes_stop)

    def _searched(self, text: str) -> str:
        return self._stop.push(text, search=self.length > self._work.sampling.min_tokens)

    def _observe(self, token: int) -> None:
        now = perf_counter()
        if not self.length:
            self._metrics.time_to_first_token.observe(now - self._begun)
            self._metrics.queue_time.observe(self._queued_s)
            self._metrics.prefill_time.observe(max(0.0, now - self._begun - self._queued_s))
            self._first = now
            self._metrics.traces.first_token(self._work.id)
        else:
            self._metrics.inter_token_latency.observe(now - self._last)
        self._last = now
        self.length += 1
        if self._request.return_token_ids:
            self._untold["token_ids"].append(token)
        self._metrics.generation_tokens.inc()


class Answer:
    """Runs the sequences of one request; a failure of one, or the client's departure, ends all of them.

    Args:
        request_id: The answer's id.
        generations: The sequences in the order of their choices.
        prompt_tokens: Tokens of all prompts; a prompt counts once, however many choices it has.
    """

    def __init__(
        self, request_id: str, generations: Sequence[Generation], prompt_tokens: int
    ) -> None:
        self.id = request_id
        self.created = int(time.time())  # for the client; nothing is decided by it
        self.generations = generations
        self._prompt_tokens = prompt_tokens
        self._queue: asyncio.Queue[tuple[int, Delivery]] | None = None

    def usage(self, index: int | None = None) -> dict[str, Any]:
        """Return the token counts so far of one choice, or of all, in OpenAI's form."""
        counted, prompt = self.generations, self._prompt_tokens
        if index is not None:
            counted = [counted[index]]
            prompt = counted[0].prompt_length
        completion = sum(each.length for each in counted)
        counts: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        reasoning = [n for each in counted if (n := each.reasoning_tokens) is not None]
        if reasoning:
            counts["completion_tokens_details"] = {"reasoning_tokens": sum(reasoning)}
        return counts

    def begin(self) -> None:
        """Queue all sequences. `end` must follow. Raises ApiError: none is queued."""
        queue = self._queue = asyncio.Queue()
        try:
            for index, generation in enumerate(self.generations):
                generation.start(lambda each, at=index: queue.put_nowait((at, each)))  # type: ignore[misc]
        except Exception as error:
            self.end("error")
            raise as_api_error(error) from error

    def end(self, reason: str = "abort") -> None:
        """End the sequences that run; the reason is that of `Generation.end`."""
        for generation in self.generations:
            generation.end(reason)

    async def pieces(self) -> AsyncIterator[tuple[int, Any]]:
        """Yield each piece of a choice (`Generation.take`) with the choice's index, as they arrive.

        The first step queues all sequences, if `begin` did not; closing the iterator cancels them.
        Raises ApiError.
        """
        if self._queue is None:
            self.begin()
        queue, reason = self._queue, "abort"
        assert queue is not None
        try:
            running = len(self.generations)
            while running:
                index, delivery = await queue.get()
                generation = self.generations[index]
                if not generation.runs:
                    continue  # a delivery that was under way when a stop string matched
                for piece in generation.take(delivery):
                    yield index, piece
                running -= not generation.runs
        except Exception as error:
            reason = "error"
            raise as_api_error(error) from error
        finally:
            self.end(reason)


def _joined(pieces: list[Any]) -> Iterator[Any]:
    """Join texts of one kind that follow one another."""
    for kind, run in groupby(pieces, type):
        if issubclass(kind, str):
            yield kind("".join(run))
        else:
            yield from run
