"""The engine that generates tokens: what handlers ask of it, and which one a model gets."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Protocol

from attention_client.serve.limits import ServeLimits
from attention_client.serve.live_admission import LiveAdmission
from attention_client.serve.sampling import Sampling
from attention_client.witness import Witness

__all__ = ["NOBODY", "Delivery", "Engine", "Work", "build_engine"]

_LOG = logging.getLogger(__name__)

NOBODY: Mapping[str, int] = MappingProxyType({})
"""No server is known to have computed anything."""


@dataclass(frozen=True)
class Work:
    """One request, as the engine sees it.

    Attributes:
        id: Unique in the process.
        prompt: Token ids, not empty.
        max_tokens: Most tokens of the answer, 1 at least.
        end_tokens: Tokens that end the answer; empty if only max_tokens does.
        sampling: How tokens are chosen.
        min_tokens: Tokens of the answer in whose text no stop string is looked for.
        servers: Say which servers computed each token.
    """

    id: str
    prompt: list[int]
    max_tokens: int
    end_tokens: tuple[int, ...]
    sampling: Sampling
    min_tokens: int = 0
    servers: bool = False


@dataclass(frozen=True)
class Delivery:
    """What the engine hands over at a time.

    Attributes:
        tokens: New tokens, an end token included.
        finished: Nothing more comes.
        error: Why the request failed; then finished is true.
        queued_s: How long the request has waited before it ran, in seconds.
        servers: Pairs of token and expert that each server computed of these tokens; empty where the work
            does not ask.
    """

    tokens: list[int]
    finished: bool = False
    error: Exception | None = None
    queued_s: float = 0.0
    servers: Mapping[str, int] = field(default_factory=lambda: NOBODY)


class Engine(Protocol):
    """Generates tokens in a thread of its own. All methods but `stop` are quick."""

    @property
    def capacity(self) -> int | None:
        """Most tokens of one request, prompt and answer; None if there is no such bound."""

    def start(self) -> None:
        """Starts the thread."""

    def submit(self, work: Work, deliver: Callable[[Delivery], None]) -> None:
        """Queues a request. Called on an event loop; deliver is called there too, until finished.

        Raises CBWorkerDeadError once the engine has stopped.
        """

    def cancel(self, request_id: str) -> None:
        """Ends a request early; nothing more of it is delivered. No effect on a finished one."""

    def failure(self) -> str | None:
        """Why the engine generates nothing any more, or None."""

    def running(self) -> int:
        """Requests in the running batch."""

    def waiting(self) -> int:
        """Requests that wait."""

    def in_batch(self) -> Iterable[str]:
        """Ids of the requests of the running forward pass. Called in the engine's thread, within one."""

    def cache_usage(self) -> float:
        """Part of the key-value cache that requests use, 0 to 1; 0 where it has no bound."""

    def stop(self, timeout_s: float) -> None:
        """Fails what is left and ends the thread, waiting for a running forward pass that long."""


def build_engine(
    model: Any, limits: ServeLimits, admission: LiveAdmission, witness: Witness
) -> Engine:
    """Continuous batching where the model's attention fits the paged cache, else one by one.

    Args:
        model: A transformers causal language model.
        limits: Sizes of cache and batch.
        admission: Says who goes into the batch; one by one, requests go as they come.
        witness: Sees which servers compute what.

    Raises ConfigError if the cache needs more memory than there is.
    """
    from attention_client.serve.batching import BatchingEngine, fits_paged_cache
    from attention_client.serve.sequential import SequentialEngine

    attention = model.config._attn_implementation
    try:
        engine = BatchingEngine(model, limits, admission, witness)
    except (ValueError, AttributeError, NotImplementedError) as error:
        # transformers' ways to say that it has no paged form of an attention.
        reason = str(error)
    else:
        if fits_paged_cache(engine.manager):
            return engine
        reason = "its attention does not fit the paged cache"
    model.set_attn_implementation(attention)  # the try may have given it a paged one
    _LOG.warning("%s is served one request at a time: %s", type(model).__name__, reason)
    admission.decline()
    return SequentialEngine(model, witness)
