"""Admission into a continuous batch: a state machine without clock or I/O.

A continuous batch has no moment at which all of it is chosen: requests end one by one, and each leaves room
for one. A strategy that must take the oldest would then have nothing to choose. So a *group* is chosen at a
time, as many requests as run together, beside the load of what runs; its members go in as room comes, the
oldest first; then the next group is chosen.

    arrive -> waiting (RequestQueue) -> chosen (a group) -> running -> left
                                          ^                   |
                                          +--- put_back ------+   the cache was full

No request waits for ever: the oldest is in every group, and of a group's members the one at the head is
overtaken, where it does not fit into the cache and others do, by no more requests than run together.
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
    """A choice whose members have not all been seen at work."""

    choice: Choice
    unseen: set[str]
    load_E: Loads


class Admission:
    """Which waiting requests are the next to go into the batch.

    Args:
        queue: New and empty; its strategy chooses.
        batch_size: Most requests that run together.
        cost: As the queue's: what a group has really cost is said by it.
    """

    def __init__(self, queue: RequestQueue, batch_size: int, cost: CostModel) -> None:
        self._queue = queue
        self._batch_size = batch_size
        self._cost = cost
        self._tickets: dict[str, int] = {}
        self._names: dict[int, str] = {}
        # Chosen and not running yet, and how often each was overtaken since.
        self._chosen: dict[str, int] = {}
        self._groups: dict[str, _Group] = {}

    def __len__(self) -> int:
        """Requests that do not run yet."""
        return len(self._tickets) + len(self._chosen)

    def price(self, cost: CostModel) -> None:
        """The placement has changed: from now on batches cost what this model says."""
        self._cost = cost
        self._queue.price(cost)

    def arrive(self, request: str, load_E: Loads) -> None:
        """A request waits.

        Args:
            request: Its name, unique.
            load_E: Predicted tokens on each expert.
        """
        ticket = self._queue.add(load_E)
        self._tickets[request] = ticket
        self._names[ticket] = request

    def put_back(self, request: str) -> None:
        """A request that ran is to run again, before all others."""
        self._chosen = {request: 0} | self._chosen

    def leave(self, request: str) -> None:
        """A request is not to run any more, or runs no more. No effect on one that is not known."""
        ticket = self._tickets.pop(request, None)
        if ticket is not None:
            del self._names[ticket]
            self._queue.remove(ticket)
        self._chosen.pop(request, None)
        # What its group costs is not known without it.
        group = self._groups.pop(request, None)
        if group is not None:
            for other in group.unseen - {request}:
                self._groups.pop(other, None)

    def candidates(
        self, room: int, running: Callable[[], Loads | None]
    ) -> tuple[list[str], list[Choice]]:
        """The requests that may go in now, in this order, and the choices that were made for that.

        Args:
            room: Requests that may be added to what runs.
            running: The load of what runs and goes on, float64 (E,), or None; asked for a choice only.
        """
        choices = []
        while len(self._chosen) < room and self._tickets:
            tickets = self._queue.take(self._batch_size, running())
            # By age: all of them go, so that nobody gains by another order.
            names = [self._names.pop(ticket) for ticket in sorted(tickets)]
            for name in names:
                del self._tickets[name]
                self._chosen[name] = 0
            assert self._queue.choice is not None
            choices.append(self._queue.choice)
            group = _Group(self._queue.choice, set(names), np.zeros(0))
            self._groups |= dict.fromkeys(names, group)
        going = list(self._chosen)[: max(room, 0)]
        if going and self._chosen[going[0]] >= self._batch_size:
            return going[:1], choices
        return going, choices

    def admit(self, requests: Iterable[str]) -> None:
        """Requests run from now on."""
        for request in requests:
            if request not in self._chosen:
                continue
            # The head alone is counted: once it goes, the next one is the head.
            head = next(iter(self._chosen))
            if request != head:
                self._chosen[head] += 1
            del self._chosen[request]

    def saw(self, request: str, load_E: Loads) -> None:
        """What a request really loads is known: its prompt has been through the router.

        Args:
            request: Its name. No effect on one that belongs to no group, or was seen before.
            load_E: In the measure of the predictions.
        """
        group = self._groups.pop(request, None)
        if group is None:
            return
        group.unseen.discard(request)
        group.load_E = load_E if not group.load_E.size else group.load_E + load_E
        if not group.unseen:
            self._queue.observe(self._cost.batch_s(group.load_E), group.choice)
