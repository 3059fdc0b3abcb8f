"""Admission of waiting requests into the attention client's continuous batch. Pure (no I/O, no clock).

Requests of a continuous batch end one by one, and each frees one place. A strategy that must take the oldest
request would have no choice. So the strategy chooses a *group* of a full batch's size, given the load of the
running requests. Members are admitted as places become free, oldest first; then the next group is chosen.

    arrive -> waiting (RequestQueue) -> chosen (a group) -> running -> left
                                          ^                   |
                                          +--- put_back ------+   the cache was full

No request waits for ever, because the oldest is in every group. If the head of a group does not fit into the
cache, at most a batch's size of requests may overtake it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from attention_client.scheduler.queue import Choice, RequestQueue
from attention_client.scheduler.strategies import Loads

__all__ = ["Admission"]


class Admission:
    """Decides which waiting requests enter the running batch next.

    Args:
        queue: New, empty queue; its strategy chooses.
        batch_size: Most requests that run together.
    """

    def __init__(self, queue: RequestQueue, batch_size: int) -> None:
        self._queue = queue
        self._batch_size = batch_size
        self._tickets: dict[str, int] = {}
        self._names: dict[int, str] = {}
        # Chosen requests that do not run yet, with how often each was overtaken at the head.
        self._chosen: dict[str, int] = {}

    def __len__(self) -> int:
        """Return how many requests wait, chosen or not."""
        return len(self._tickets) + len(self._chosen)

    def arrive(self, request: str, load_E: Loads) -> None:
        """Queue a new request, by its unique name and predicted tokens on each expert, for later groups."""
        ticket = self._queue.add(load_E)
        self._tickets[request] = ticket
        self._names[ticket] = request

    def put_back(self, request: str) -> None:
        """Make a request evicted from the full cache wait again; it is admitted before all others."""
        self._chosen = {request: 0} | self._chosen

    def leave(self, request: str) -> None:
        """Remove a request that ended or was cancelled or evicted (then `put_back`). Ignores others."""
        ticket = self._tickets.pop(request, None)
        if ticket is not None:
            del self._names[ticket]
            self._queue.remove(ticket)
        self._chosen.pop(request, None)

    def candidates(
        self, places: int, running: Callable[[], Loads | None]
    ) -> tuple[list[str], list[Choice]]:
        """Choose the requests that may enter the batch now; the engine reports those that fit by `admit`.

        Args:
            places: Free places in the batch.
            running: Returns the load of the running requests, float64 (E,), or None. Called only to choose.

        Returns:
            The requests, in order of admission, and the choices made for them.
        """
        choices = []
        while len(self._chosen) < places and self._tickets:
            tickets = self._queue.take(self._batch_size, running())
            # Sort by age, because all of them will be admitted and another order gains nothing.
            names = [self._names.pop(ticket) for ticket in sorted(tickets)]
            for name in names:
                del self._tickets[name]
                self._chosen[name] = 0
            assert self._queue.choice is not None
            choices.append(self._queue.choice)
        going = list(self._chosen)[: max(places, 0)]
        if going and self._chosen[going[0]] >= self._batch_size:
            return going[:1], choices
        return going, choices

    def admit(self, requests: Iterable[str]) -> None:
        """Mark chosen requests as running; a head overtaken too often is then the only candidate."""
        for request in requests:
            if request not in self._chosen:
                continue
            # Count only for the head; the next request becomes the head when this one is admitted.
            head = next(iter(self._chosen))
            if request != head:
                self._chosen[head] += 1
            del self._chosen[request]
