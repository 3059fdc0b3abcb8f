"""Delivery of new tokens from the generation thread to the requests that listen on the HTTP event loop."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from transformers.cli.serving.utils import CBWorkerDeadError
from transformers.generation.continuous_batching.continuous_api import OutputRouter

from attention_client.layer_call.expert_attribution import SeenServers
from attention_client.serving.api_error import ApiError
from attention_client.serving.generation.engine import NOBODY, Delivery, Work
from attention_client.serving.generation.scores import Scores
from eaas.errors import EaasError

__all__ = ["Router"]

_LOG = logging.getLogger(__name__)


class _Listener:
    """The callback that gets one request's new tokens, and the HTTP event loop on which it runs.

    It holds what the next delivery adds to the tokens, so that nothing is left of a cancelled request.
    """

    def __init__(self, work: Work, deliver: Callable[[Delivery], None]) -> None:
        self.deliver = deliver
        self.loop = asyncio.get_running_loop()
        self.seen = 0  # tokens delivered
        self.scores: Scores | None = None
        sampling = work.sampling
        self.prompt_scores: list[Scores] = []
        if sampling.prompt_logprobs:
            self.prompt_scores.append(Scores.none(sampling.logprobs or 0))

    def delivery(self, output: Any, servers: Mapping[str, int]) -> Delivery:
        """Make the delivery of a request's new tokens (transformers' `GenerationOutput`)."""
        tokens = output.generated_tokens[self.seen :]
        self.seen += len(tokens)
        queued_s = output.lifespan[0] - output.created_time
        prompt_scores = Scores.joined(self.prompt_scores) if self.prompt_scores else None
        scores, self.scores, self.prompt_scores = self.scores, None, []
        return Delivery(
            tokens, output.is_finished(), output.error, queued_s, servers, scores, prompt_scores
        )


class Router(OutputRouter):  # type: ignore[misc]
    """Passes new tokens from the generation thread to the HTTP event loop, for requests that still listen."""

    def __init__(self) -> None:
        super().__init__()
        self._listeners: dict[str, _Listener] = {}
        # Requests that asked for the servers of their tokens, and the servers of the current step.
        self._asking: set[str] = set()
        # Requests whose prompt is being scored.
        self._scoring: set[str] = set()
        self._servers: dict[str, Mapping[str, int]] = {}
        self._guard = threading.Lock()

    def listen(self, work: Work, deliver: Callable[[Delivery], None]) -> None:
        """Deliver a request's tokens from now on. Call it on the event loop on which `deliver` is called."""
        with self._guard:
            self._listeners[work.id] = _Listener(work, deliver)
            if work.servers:
                self._asking.add(work.id)
            if work.sampling.prompt_logprobs:
                self._scoring.add(work.id)

    @property
    def scores_prompts(self) -> bool:
        """Whether a request has asked for the scores of its prompt."""
        return bool(self._scoring)

    @property
    def asks_for_servers(self) -> bool:
        """Whether a request has asked for the servers of its tokens."""
        return bool(self._asking)

    def note_servers(self, batch: Sequence[Any], seen: SeenServers) -> None:
        """Keep the servers of this step's new tokens for the requests that asked; `deliver_batch` sends them.

        `batch` holds transformers' `FutureRequestState`s in token order.
        """
        end = 0
        # Without the lock, a request cancelled during the loop would leave its entry here.
        with self._guard:
            for part in batch:
                end += part.query_length
                # The next token is chosen by the request's last token of the step.
                if part.has_new_token and part.state.request_id in self._asking:
                    self._servers[part.state.request_id] = seen.of(end - 1)

    def note_scores(self, scores: Mapping[str, Scores]) -> None:
        """Keep the scores of this step's new tokens by request id; `deliver_batch` sends them."""
        with self._guard:
            for request_id, each in scores.items():
                if (listener := self._listeners.get(request_id)) is not None:
                    listener.scores = each

    def note_prompt_scores(self, request_id: str, scores: Scores) -> None:
        """Keep the scores of a prompt's next tokens until the request's first delivery."""
        with self._guard:
            if (listener := self._listeners.get(request_id)) is not None:
                listener.prompt_scores.append(scores)

    def scored(self, request_id: str) -> int:
        """Return how many tokens of a request's prompt have scores; all, once they are delivered."""
        with self._guard:
            if request_id not in self._scoring:
                return sys.maxsize
            parts = self._listeners[request_id].prompt_scores
            return sum(len(part.logprob_T) for part in parts)

    def forget(self, request_id: str) -> bool:
        """Remove a request's listener, so that it gets nothing more; return whether there was one."""
        with self._guard:
            return self._pop(request_id) is not None

    def _pop(self, request_id: str) -> _Listener | None:
        self._asking.discard(request_id)
        self._scoring.discard(request_id)
        self._servers.pop(request_id, None)
        return self._listeners.pop(request_id, None)

    def deliver(self, output: Any) -> None:
        """Deliver one request's new tokens (transformers' `GenerationOutput`)."""
        self.deliver_batch([output])

    def deliver_batch(self, outputs: list[Any]) -> None:
        """Deliver the new tokens of a step, with one wake-up of the event loop."""
        with self._guard:
            calls = []
            for output in outputs:
                listener = self._listeners.get(output.request_id)
                if listener is None:
                    continue  # cancelled
                servers = self._servers.pop(output.request_id, NOBODY)
                self._scoring.discard(output.request_id)
                delivery = listener.delivery(output, servers)
                if delivery.finished:
                    self._pop(output.request_id)
                calls.append((listener, delivery))
        self._call(calls)

    def fail_and_deliver(self, state: Any, error: Exception) -> None:
        """Fail one request (transformers' `RequestState`)."""
        # The base class keeps only the error's text; the listener needs its type.
        self.fail(state.request_id, error)

    def fail(self, request_id: str, error: Exception) -> None:
        """Deliver this error to one request, as its last delivery."""
        self._fail([request_id], error)

    def fail_all(self, error: Exception) -> None:
        """Deliver this error to every request that waits or runs: the engine stops, or its thread died."""
        self._fail(list(self._listeners), error)

    def _fail(self, request_ids: list[str], error: Exception) -> None:
        if not isinstance(error, (ApiError, EaasError, CBWorkerDeadError)):
            error = CBWorkerDeadError(f"The engine has stopped: {error}")
        with self._guard:
            failed = [self._pop(request_id) for request_id in request_ids]
        delivery = Delivery([], finished=True, error=error)
        self._call([(listener, delivery) for listener in failed if listener is not None])

    def _call(self, calls: list[tuple[_Listener, Delivery]]) -> None:
        if not calls:
            return
        # All listeners are on the HTTP server's loop. One wake-up costs more than the calls.
        try:
            calls[0][0].loop.call_soon_threadsafe(_deliver_all, calls)
        except RuntimeError:  # the loop ended before its last requests
            _LOG.info("%d deliveries after the end of their event loop", len(calls))


def _deliver_all(batch: list[tuple[_Listener, Delivery]]) -> None:
    for listener, delivery in batch:
        listener.deliver(delivery)
