"""The interface of an engine, which runs the model and generates the tokens of requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

from eaas.generation.errors import ApiError
from eaas.generation.sampling import Sampling
from eaas.generation.scores import Scores

__all__ = ["NOBODY", "Delivery", "Engine", "Work", "refuse_longer"]

NOBODY: Mapping[str, int] = MappingProxyType({})
"""Value of `Delivery.servers` if no server is known."""


@dataclass(frozen=True)
class Work:
    """One sequence for an engine: a prompt, and the part of its answer that is known already.

    A sequence that was evicted from the cache, or that another engine began, goes on from its tokens: limits,
    draws, penalties and the grammar count from the end of the prompt.

    Attributes:
        id: Unique in the process.
        tokens: Token ids of the prompt, not empty, and of the answer so far.
        prompt_length: Tokens of the prompt.
        max_tokens: Most tokens of the answer, more than it has.
        end_tokens: Tokens that end the answer; empty: only max_tokens ends it.
        sampling: Sampling settings.
        servers: Whether to report the servers that computed each token's routed experts.
        trace: Context of its span (`eaas.telemetry.tracing.pack`); empty: it is not traced.
    """

    id: str
    tokens: Sequence[int]
    prompt_length: int
    max_tokens: int
    end_tokens: tuple[int, ...]
    sampling: Sampling
    servers: bool = False
    trace: bytes = b""

    @property
    def prompt(self) -> list[int]:
        """Token ids of the prompt."""
        return list(self.tokens[: self.prompt_length])


@dataclass(frozen=True)
class Delivery:
    """New tokens of a request, sent from the engine's thread to the event loop of its user.

    The first delivery has no tokens: it says that the engine computes the request from now on.

    Attributes:
        tokens: The tokens, including an end token.
        finished: Whether this is the last delivery.
        error: Why the request failed; then finished is true.
        queued_s: In the first delivery the time that the request waited, in seconds.
        servers: (token, expert) pairs of these tokens by server; empty if the work does not ask for them.
        scores: Log-probabilities of these tokens; None if the work does not ask for them.
        prompt_scores: Log-probabilities of the prompt's tokens, with the first delivery; None if the work
            does not ask for them.
    """

    tokens: list[int]
    finished: bool = False
    error: Exception | None = None
    queued_s: float = 0.0
    servers: Mapping[str, int] = field(default_factory=lambda: NOBODY)
    scores: Scores | None = None
    prompt_scores: Scores | None = None


def refuse_longer(work: Work, capacity: int | None) -> None:
    """Raise ApiError (400) if a request may get longer than an engine's capacity; None: no limit."""
    # The last token is never stored.
    longest = work.prompt_length + work.max_tokens - 1
    if capacity is not None and longest > capacity:
        reason = f"{longest} tokens do not fit into the cache of {capacity}."
        raise ApiError.invalid("max_tokens", f"'max_tokens': {reason}")


class Engine(Protocol):
    """Generates the tokens of requests in its own thread. Only `stop` blocks."""

    @property
    def capacity(self) -> int | None:
        """Most tokens of one request, prompt plus answer; longer ones are refused. None: no limit."""

    def start(self) -> None:
        """Start the engine's thread, before the first request."""

    def submit(self, work: Work, deliver: Callable[[Delivery], None]) -> None:
        """Queue a request. Call it on an event loop; `deliver` is called on the same loop.

        Raises EngineStoppedError if the engine has stopped.
        """

    def cancel(self, request_id: str) -> None:
        """End a request early: its client left, or a stop string matched. Nothing more is delivered.

        No effect on a finished request.
        """

    def failure(self) -> str | None:
        """Return why the engine has stopped, which fails /health and new requests; None: it runs."""

    def running(self) -> int:
        """Number of requests in the running batch, for the metrics."""

    def waiting(self) -> int:
        """Number of requests that wait for a place in the batch, for the metrics."""

    def traced(self) -> Sequence[bytes]:
        """Traces of the requests in the current forward pass (`Work.trace`). Call it from that pass."""

    def cache_usage(self) -> float:
        """Fraction of the key-value cache in use by requests, 0 to 1; 0: the cache has no limit."""

    def is_compiled(self) -> bool:
        """Whether forward passes run in compiled code, for the metrics."""

    def stop(self, timeout_s: float) -> None:
        """Fail all requests and end the engine's thread, when the endpoint stops.

        Wait at most `timeout_s` for a running forward pass.
        """
