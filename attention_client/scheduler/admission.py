"""Admission into a continuous batch. Pure state machine (no I/O, no clock).

Requests of a continuous batch end one by one, and each frees one place. A strategy that must take the oldest
request would have no choice. So the strategy chooses a *group* of a full batch's size, given the load of the
running requests. Members go in as places become free, oldest first; then the next group is chosen.

    arrive -> waiting (RequestQueue) -> chosen (a group) -> running -> left
                                          ^                   |
                                          +--- put_back ------+   the cache was full

No request waits for ever: the oldest is in every group. If the head of a group does not fit into the cache,
at most a batch's size of requests may overtake it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from attention_client.scheduler.cost import CostModel, Loads
from attention_client.scheduler.queue import Choice, RequestQueue

__all__ = ["Admission"]


@dataclass
class _Group:
    """A choice with members whose true load is not known yet."""

    choice: Choice
    unseen: set[str]
    load_E: Loads


class Admission:
    """Decides which waiting requests go into the batch next.

    Args:
        queue: New and empty; its strategy chooses.
        batch_size: Most requests that run together.
        cost: The queue's cost model; computes the true cost of a group.
    """

    def __init__(self, queue: RequestQueue, batch_size: int, cost: CostModel) -> None:
        self._queue = queue
        self._batch_size = batch_size
        self._cost = cost
        self._tickets: dict[str, int] = {}
        self._names: dict[int, str] = {}
        # Chosen requests that do not run yet, with how often each was overtaken at the head.
        self._chosen: dict[str, int] = {}
        self._groups: dict[str, _Group] = {}

    def __len__(self) -> int:
        """Waiting requests."""
        return len(self._tickets) + len(self._chosen)

    def price(self, cost: CostModel) -> None:
        """Use another cost model from now on: the placement has changed."""
        self._cost = cost
        self._queue.price(cost)

    def arrive(self, request: str, load_E: Loads) -> None:
        """Add a waiting request: its unique name, and its predicted tokens on each expert."""
        ticket = self._queue.add(load_E)
        self._tickets[request] = ticket
        self._names[ticket] = request

    def put_back(self, request: str) -> None:
        """Let a request that ran wait again, ahead of all others."""
        self._chosen = {request: 0} | self._chosen

    def leave(self, request: str) -> None:
        """Remove a request that ended or was cancelled. No effect on an unknown one."""
        ticket = self._tickets.pop(request, None)
        if ticket is not None:
            del self._names[ticket]
            self._queue.remove(ticket)
        self._chosen.pop(request, None)
        # Without it, the true cost of its group stays unknown.
        group = self._groups.pop(request, None)
        if group is not None:
            for other in group.unseen - {request}:
                self._groups.pop(other, None)

    def candidates(
        self, places: int, running: Callable[[], Loads | None]
    ) -> tuple[list[str], list[Choice]]:
        """Choose the requests that may go in now.

        Args:
            places: Free places in the batch.
            running: Returns the load of the running requests, float64 (E,), or None. Called only to choose.

        Returns:
            The requests, in this order, and the choices made for them.
        """
        choices = []
        while len(self._chosen) < places and self._tickets:
            tickets = self._queue.take(self._batch_size, running())
            # By age: all of them go, so another order gains nothing.
            names = [self._names.pop(ticket) for ticket in sorted(tickets)]
            for name in names:
                del self._tickets[name]
                self._chosen[name] = 0
            assert self._queue.choice is not None
            choices.append(self._queue.choice)
            group = _Group(self._queue.choice, set(names), np.zeros(0))
            self._groups |= dict.fromkeys(names, group)
        going = list(self._chosen)[: max(places, 0)]
        if going and self._chosen[going[0]] >= self._batch_size:
            return going[:1], choices
        return going, choices

    def admit(self, requests: Iterable[str]) -> None:
        """Mark requests as running."""
        for request in requests:
            if request not in self._chosen:
                continue
            # Only the head is counted; the next request becomes the head when it goes.
            head = next(iter(self._chosen))
            if request != head:
                self._chosen[head] += 1
            del self._chosen[request]

    def saw(self, request: str, load_E: Loads) -> None:
        """Record the true load of a request after its prefill, in the unit of the predictions.

        Only the first counts. No effect on a request without a group.
        """
        group = self._groups.pop(request, None)
        if group is None:
            return
        group.unseen.discard(request)
        group.load_E = load_E if not group.load_E.size else group.load_E + load_E
        if not group.unseen:
            self._queue.observe(self._cost.batch_s(group.load_E), group.choice)
