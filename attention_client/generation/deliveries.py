"""Deliveries of new tokens, from the engine's thread to the event loop of the requests' handlers.

A request that was cancelled has no listener any more, and what the engine still has for it is dropped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

from attention_client.generation.runner import Outcome
from attention_client.generation.scheduler import Part, Sequence
from eaas.generation.scores import Scores
from eaas.generation.work import Delivery, Work

__all__ = ["Deliveries"]

_LOG = logging.getLogger(__name__)


class _Listener:
    """The callback that gets one request's new tokens, and the event loop on which it runs."""

    def __init__(self, work: Work, deliver: Callable[[Delivery], None]) -> None:
        self.deliver = deliver
        self.loop = asyncio.get_running_loop()
        self._submitted_s = time.perf_counter()
        self._has_begun = False
        self._prompt_scores: list[Scores] = []
        if work.sampling.prompt_logprobs:
            self._prompt_scores.append(Scores.none(work.sampling.logprobs or 0))

    def begin(self) -> Delivery | None:
        """Make the delivery that says that the request runs; None: it was made before."""
        if self._has_begun:
            return None
        self._has_begun = True
        return Delivery([], queued_s=time.perf_counter() - self._submitted_s)

    def delivery(self, outcome: Outcome, finished: bool) -> Delivery | None:
        """Make the delivery of a pass's token; None: the prompt is not computed yet."""
        if outcome.prompt_scores is not None:
            self._prompt_scores.append(outcome.prompt_scores)
        if outcome.token is None:
            return None
        taken, self._prompt_scores = self._prompt_scores, []
        return Delivery(
            [outcome.token],
            finished,
            servers=outcome.servers,
            scores=outcome.scores,
            prompt_scores=Scores.joined(taken) if taken else None,
        )


class Deliveries:
    """The listeners of an engine's requests. All are on one event loop."""

    def __init__(self) -> None:
        self._listeners: dict[str, _Listener] = {}

    def __len__(self) -> int:
        """Return how many requests have not ended."""
        return len(self._listeners)

    def listen(self, work: Work, deliver: Callable[[Delivery], None]) -> None:
        """Deliver a request's tokens from now on. Call it on the event loop on which `deliver` is called."""
        self._listeners[work.id] = _Listener(work, deliver)

    def forget(self, name: str) -> bool:
        """Deliver nothing more to a request; return whether it had not ended. Call it on the event loop."""
        return self._listeners.pop(name, None) is not None

    def begin(self, parts: Iterable[Part]) -> None:
        """Tell the requests of a pass, before it, that they run."""
        calls = []
        for part in parts:
            listener = self._listeners.get(part.sequence.id)
            if listener is not None and (found := listener.begin()) is not None:
                calls.append((part.sequence.id, listener, found))
        self._call(calls)

    def send(self, results: Iterable[tuple[Sequence, Outcome]]) -> None:
        """Deliver what a pass has for its sequences, with one wake-up of the event loop."""
        calls = []
        for sequence, outcome in results:
            listener = self._listeners.get(sequence.id)
            if listener is None:
                continue
            if outcome.error is not None:
                calls.append((sequence.id, listener, _failure(outcome.error)))
            elif (found := listener.delivery(outcome, sequence.is_finished)) is not None:
                calls.append((sequence.id, listener, found))
        self._call(calls)

    def fail(self, names: Iterable[str], error: Exception) -> None:
        """Deliver an error to some requests, as their last delivery."""
        found = [(name, self._listeners.get(name)) for name in names]
        self._call([(name, each, _failure(error)) for name, each in found if each is not None])

    def fail_all(self, error: Exception) -> None:
        """Deliver an error to every request, as its last delivery."""
        self.fail(list(self._listeners), error)

    def _call(self, calls: list[tuple[str, _Listener, Delivery]]) -> None:
        if not calls:
            return
        # One wake-up costs more than the calls.
        try:
            calls[0][1].loop.call_soon_threadsafe(self._deliver_all, calls)
        except RuntimeError:  # the loop ended before its last requests
            _LOG.info("%d deliveries after the end of their event loop", len(calls))

    def _deliver_all(self, calls: list[tuple[str, _Listener, Delivery]]) -> None:
        """Run on the event loop, where requests are cancelled, too."""
        for name, listener, delivery in calls:
            if self._listeners.get(name) is listener:
                if delivery.finished:
                    del self._listeners[name]
                listener.deliver(delivery)


def _failure(error: Exception) -> Delivery:
    return Delivery([], finished=True, error=error)
