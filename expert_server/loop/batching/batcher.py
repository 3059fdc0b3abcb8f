"""Queues of admitted requests, one per layer.

    admit ----> queue of their layer ----> decide: Compute(layer) | Wait(connection, until) | None
                                              |
                            take(layer) <-----+

Requests of a layer form one batch. The layer with the oldest request is next, so none starves. Requests join
a layer's batch until it is taken, also while another layer is computed. The policy decides whether the next
batch waits for more requests.

Connections (C) and requests (R) are opaque to the batcher; times are monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from math import inf
from typing import Generic, NamedTuple, TypeVar

__all__ = ["Batcher", "Compute", "Policy", "Queue", "Wait"]

C = TypeVar("C", bound=Hashable)
R = TypeVar("R")


class Compute(NamedTuple):
    """Compute this layer's requests now."""

    layer: int


class Wait(NamedTuple, Generic[C]):
    """Decide again when this connection has written, and at `until` at the latest."""

    connection: C
    until: float


@dataclass(slots=True)
class Queue(Generic[R]):
    """The requests of one layer.

    Attributes:
        layer: MoE layer.
        since: When the oldest request was admitted.
        held_since: When they could first have been computed; infinite before that.
        requests: In the order of admission.
    """

    layer: int
    since: float
    held_since: float = inf
    requests: list[R] = field(default_factory=list)


class Policy(Generic[C]):
    """Decides whether a batch waits for more requests. Events come in the order of time."""

    def admitted(self, connection: C, layer: int) -> None:
        """A connection wrote a request."""

    def answered(self, connection: C, now: float) -> None:
        """A connection's request was answered or dropped."""

    def computed(self, tokens: int, seconds: float) -> None:
        """A batch of this many tokens took this long."""

    def keep(self, connections: Collection[C]) -> None:
        """Forget all other connections."""

    def wait(self, queue: Queue[R], alone: bool, now: float) -> Wait[C] | None:
        """The connection that the next batch waits for; None: compute it now.

        Args:
            queue: The next batch.
            alone: No other layer has requests.
            now: Monotonic seconds.
        """
        return None


class Batcher(Generic[C, R]):
    """See the module.

    Args:
        policy: Decides how long a batch waits.
    """

    def __init__(self, policy: Policy[C]) -> None:
        self._policy = policy
        # Queues are added by their first request and removed whole, so the dictionary is in order of age.
        self._queues: dict[int, Queue[R]] = {}
        # The loop reports these events to the policy directly.
        self.answered = policy.answered
        self.computed = policy.computed
        self.keep = policy.keep

    @property
    def is_empty(self) -> bool:
        """Whether no request waits."""
        return not self._queues

    def admit(self, request: R, connection: C, layer: int, now: float) -> None:
        """Put a request into its layer's queue."""
        queue = self._queues.get(layer)
        if queue is None:
            queue = self._queues[layer] = Queue(layer, now)
        queue.requests.append(request)
        self._policy.admitted(connection, layer)

    def decide(self, now: float) -> Compute | Wait[C] | None:
        """The next action; None if no request waits."""
        if not self._queues:
            return None
        queue = next(iter(self._queues.values()))
        queue.held_since = min(queue.held_since, now)
        wait = self._policy.wait(queue, len(self._queues) == 1, now)
        return Compute(queue.layer) if wait is None else wait

    def layers(self) -> list[int]:
        """The layers with requests, in the order of computation."""
        return list(self._queues)

    def take(self, layer: int) -> list[R]:
        """Remove and return a layer's requests, oldest first."""
        return self._queues.pop(layer).requests
