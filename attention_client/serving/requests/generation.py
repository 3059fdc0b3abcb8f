"""The answer to one request on the HTTP event loop: the engine's tokens in, pieces of its choices out."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from time import perf_counter
from typing import Any

from attention_client.serving.errors import as_api_error
from attention_client.serving.families.reader import Call, Reasoning
from attention_client.serving.prompts.bodies import GenerationRequest
from attention_client.serving.requests.form import Form
from attention_client.serving.requests.logprobs import Scored
from attention_client.serving.requests.service import Service
from attention_client.serving.requests.text import Detokenizer, StopStrings
from eaas.generation.work import Delivery, Work

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
        ids: The answer's tokens so far, including the end token.
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
        self.ids: list[int] = []
        self._scored: list[Scored] = []
        # The first token that `take_ids` did not return; None: nor the prompt.
        self._untold: int | None = None
        self._calls = False
        self._echo = echo
        self.runs = False
        self._begun = self._first = self._last = perf_counter()

    @property
    def prompt(self) -> list[int]:
        """The tokens of the prompt."""
        return self._work.prompt

    @property
    def reasoning_tokens(self) -> int | None:
        """Number of tokens so far whose text is reasoning; None: answers have none."""
        return None if self._form.markup.reasoning is None else self._reader.reasoning_tokens

    def start(self, deliver: Callable[[Delivery], None]) -> None:
        """Queue the sequence. `end` must follow."""
        self.runs = True
        traces = self._metrics.traces
        if traces is not None:
            traces.begin(self._work.id, self._work.prompt_length, self._work.max_tokens)
        self._engine.submit(self._work, deliver)
        self._metrics.prompt_tokens.inc(self._work.prompt_length)

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
        metrics.request_prompt_tokens.observe(self._work.prompt_length)
        metrics.request_generation_tokens.observe(len(self.ids))
        if self.ids:
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
            self._observe(token, delivery)
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
        return self._stop.push(text, search=len(self.ids) > self._work.sampling.min_tokens)

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

    def usage(self, index: int | None = None) -> dict[str, Any]:
        """Return the token counts so far of one choice, or of all, in OpenAI's form."""
        counted, prompt = self.generations, self._prompt_tokens
        if index is not None:
            counted = [counted[index]]
            prompt = len(counted[0].prompt)
        completion = sum(len(each.ids) for each in counted)
        counts: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }
        reasoning = [n for each in counted if (n := each.reasoning_tokens) is not None]
        if reasoning:
            counts["completion_tokens_details"] = {"reasoning_tokens": sum(reasoning)}
        return counts

    async def pieces(self) -> AsyncIterator[tuple[int, Any]]:
        """Yield each piece of a choice (`Generation.take`) with the choice's index, as they arrive.

        The first step queues all sequences; closing the iterator cancels them. Raises ApiError.
        """
        queue: asyncio.Queue[tuple[int, Delivery]] = asyncio.Queue()
        reason = "abort"
        try:
            for index, generation in enumerate(self.generations):
                generation.start(lambda each, at=index: queue.put_nowait((at, each)))  # type: ignore[misc]
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
            for generation in self.generations:
                generation.end(reason)


def _joined(pieces: list[Any]) -> Iterator[Any]:
    """Join texts of one kind that follow one another."""
    for kind, run in groupby(pieces, type):
        if issubclass(kind, str):
            yield kind("".join(run))
        else:
            yield from run
