"""Requests that were admitted and wait to be computed.

    admit ----> queue of their layer ----> decide: Compute(layer) | Wait(whom, until) | None
                                              |
                            take(layer) <-----+

Requests of a layer make one batch, and the layer with the oldest request is next: none starves. What comes
for a layer before it is taken joins its batch, also while another layer is computed. Whether the next
batch waits for company is the policy's affair.

Connections (C) and requests (R) are whatever the caller puts in; times are monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field
from math import inf
from typing import Generic, NamedTuple, Protocol, TypeVar

__all__ = ["Batcher", "Compute", "Policy", "Queue", "Wait"]

C = TypeVar("C", bound=Hashable)
R = TypeVar("R")


class Compute(NamedTuple):
    """Compute what waits for this layer, now."""

    layer: int


class Wait(NamedTuple, Generic[C]):
    """Look again when this connection has written, but at `until` at the latest."""

    connection: C
    until: float


@dataclass(slots=True)
class Queue(Generic[R]):
    """The requests of one layer.

    Attributes:
        layer: MoE layer.
        since: When the oldest of them was admitted.
        held_since: When they could have been computed for the first time; before that, infinite.
        requests: In the order they were admitted.
    """

    layer: int
    since: float
    held_since: float = inf
    requests: list[R] = field(default_factory=list)


class Policy(Protocol[C]):
    """Whether a batch waits for company. Hears of what happens in the order of time."""

    def admitted(self, connection: C, layer: int) -> None:
        """A connection wrote a request."""

    def answered(self, connection: C, now: float) -> None:
        """A request of a connection has its answer, or needs none any more."""

    def computed(self, tokens: int, seconds: float) -> None:
        """A batch of so many tokens took so long."""

    def keep(self, connections: Collection[C]) -> None:
        """These are all the connections that there are now."""

    def wait(self, queue: Queue[R], alone: bool, now: float) -> Wait[C] | None:
        """Whom the next batch is to wait for; None: it is computed now.

        Args:
            queue: The next batch.
            alone: Nothing waits for another layer.
            now: The time.
        """


class Batcher(Generic[C, R]):
    """See the module.

    Args:
        policy: Decides about waiting.
    """

    def __init__(self, policy: Policy[C]) -> None:
        self._policy = policy
        # Queues are put in by their first request and taken out whole: so they are in order of age.
        self._queues: dict[int, Queue[R]] = {}
        # What the loop tells on behalf of the policy goes straight to it.
        self.answered = policy.answered
        self.computed = policy.computed
        self.keep = policy.keep

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._queues

    def admit(self, request: R, connection: C, layer: int, now: float) -> None:
        """Put a request into its layer's queue."""
        queue = self._queues.get(layer)
        if queue is None:
            queue = self._queues[layer] = Queue(layer, now)
        queue.requests.append(request)
        self._policy.admitted(connection, layer)

    def decide(self, now: float) -> Compute | Wait[C] | None:
        """What is to be done now; None where nothing waits."""
        if not self._queues:
            return None
        queue = next(iter(self._queues.values()))
        queue.held_since = min(queue.held_since, now)
        wait = self._policy.wait(queue, len(self._queues) == 1, now)
        return Compute(queue.layer) if wait is None else wait

    def layers(self) -> list[int]:
        """The layers that have requests, in the order in which they are to be computed."""
        return list(self._queues)

    def take(self, layer: int) -> list[R]:
        """Take a layer's requests out, oldest first, to compute them."""
        return self._queues.pop(layer).requests
