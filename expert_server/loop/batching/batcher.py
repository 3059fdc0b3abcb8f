"""Queues of the requests that an expert server's loop has admitted, one per MoE layer.

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
    """Decision to compute this layer's requests now."""

    layer: int


class Wait(NamedTuple, Generic[C]):
    """Decision to wait until this connection has written, at most until `until`, and decide again."""

    connection: C
    until: float


@dataclass(slots=True)
class Queue(Generic[R]):
    """The admitted requests of one layer.

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
        """Event: a client connection's request for this layer was put into its queue."""

    def answered(self, connection: C, now: float) -> None:
        """Event: a client connection's request was answered or dropped, so its next one may follow."""

    def computed(self, tokens: int, seconds: float) -> None:
        """Event: the loop computed a layer's requests, this many tokens in this many seconds."""

    def keep(self, connections: Collection[C]) -> None:
        """Drop what is stored about all other connections, which are closed: no batch waits for them."""

    def never_waits(self, connections: int) -> bool:
        """Whether `wait` returns None for every request, while there are so many connections at most.

        False if that is not certain. Changes nothing.
        """
        return True

    def wait(self, queue: Queue[R], alone: bool, now: float) -> Wait[C] | None:
        """Return the connection that the next batch waits for; None: compute it now.

        Args:
            queue: The next batch.
            alone: Whether no other layer has requests.
            now: Monotonic seconds.
        """
        return None


class Batcher(Generic[C, R]):
    """Queues admitted requests by layer and decides when the loop computes which (see the module).

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
        self.never_waits = policy.never_waits

    def admit(self, request: R, connection: C, layer: int, now: float) -> None:
        """Put an admitted request into its layer's queue, to join its next batch, and tell the policy."""
        queue = self._queues.get(layer)
        if queue is None:
            queue = self._queues[layer] = Queue(layer, now)
        queue.requests.append(request)
        self._policy.admitted(connection, layer)

    def computed_alone(
        self, connection: C, layer: int, tokens: int, began: float, now: float
    ) -> None:
        """Tell the policy of a request that has its answer and was never queued, since it `never_waits`."""
        self._policy.admitted(connection, layer)
        self._policy.computed(tokens, now - began)
        self._policy.answered(connection, now)

    def decide(self, now: float) -> Compute | Wait[C] | None:
        """Return what the loop does next: compute a layer or wait; None if no request waits."""
        if not self._queues:
            return None
        queue = next(iter(self._queues.values()))
        queue.held_since = min(queue.held_since, now)
        wait = self._policy.wait(queue, len(self._queues) == 1, now)
        return Compute(queue.layer) if wait is None else wait

    def layers(self) -> list[int]:
        """List the layers with requests, oldest first; for `ServeLoop.serve`, which never waits."""
        return list(self._queues)

    def take(self, layer: int) -> list[R]:
        """Remove and return a layer's requests, oldest first, to compute now; later ones queue anew."""
        return self._queues.pop(layer).requests
