"""Queue of requests that wait for a client's engine, or a simulated one. Pure (no I/O, no clock)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from attention_client.scheduler.strategies import (
    Context,
    Loads,
    SelectionStrategy,
)
from eaas.errors import ConfigError

__all__ = ["Choice", "RequestQueue"]


@dataclass(frozen=True, slots=True)
class Choice:
    """One batch taken from the queue.

    Attributes:
        tickets: The chosen requests, in the order chosen.
        window: Number of requests to choose from (W).
        passed_over: Number of requests of the window that keep waiting while a younger one is taken.
    """

    tickets: list[int]
    window: int
    passed_over: int

    @property
    def oldest(self) -> bool:
        """Whether these are the window's oldest requests, as first-come-first-served would take."""
        return not self.passed_over


class RequestQueue:
    """Waiting requests, oldest first, from which a strategy takes the next batch.

    Args:
        strategy: Chooses the batches.
        batch_size: Requests of a full batch.
        window_size: Oldest requests that the strategy may choose from.
        seed: Seed of the strategy's random numbers.
        note: Called with each event, as keyword arguments (`recording.py`).

    Attributes:
        choice: The latest choice; None before the first.

    Raises:
        ConfigError: The window is smaller than a batch, or the batch size is not positive.
    """

    def __init__(
        self,
        strategy: SelectionStrategy,
        *,
        batch_size: int,
        window_size: int,
        seed: int | Sequence[int] = 0,
        note: Callable[..., None] | None = None,
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch size {batch_size}: must be at least 1")
        if window_size < batch_size:
            raise ConfigError(
                f"window of {window_size} requests: smaller than a batch of {batch_size}, "
                "which could never be filled"
            )
        self._strategy = strategy
        self._batch_size, self._window_size = batch_size, window_size
        self._rng = np.random.default_rng(seed)
        self._note = note or (lambda **_event: None)
        # Ordered by ticket, and so by age.
        self._load_E: dict[int, Loads] = {}
        self._next = 0
        self.choice: Choice | None = None

    def __len__(self) -> int:
        return len(self._load_E)

    def add(self, load_E: Loads) -> int:
        """Queue a request with its predicted tokens on each expert. Returns its ticket, rising by one."""
        ticket = self._next
        self._next += 1
        self._load_E[ticket] = load_E
        self._note(add=ticket, load=load_E)
        return ticket

    def remove(self, ticket: int) -> None:
        """Remove a cancelled request, so that it is never taken. Raises KeyError if it is not waiting."""
        del self._load_E[ticket]
        self._note(remove=ticket)

    def use(self, strategy: SelectionStrategy) -> None:
        """Replace the strategy after it failed."""
        self._strategy = strategy
        self._note(use=strategy.name)

    def take(self, batch_size: int | None = None, running_E: Loads | None = None) -> list[int]:
        """Let the strategy choose the next batch, and remove it from the queue; the caller runs it.

        Args:
            batch_size: Most requests to take; None: a full batch.
            running_E: Load of requests that continue to run.

        Returns:
            The chosen tickets, in the order chosen.

        Raises:
            ConfigError: The strategy broke its contract.
        """
        tickets = self._take(batch_size, running_E)
        self._note(take=tickets, room=batch_size, running=running_E)
        return tickets

    def _take(self, batch_size: int | None, running_E: Loads | None) -> list[int]:
        waiting = list(itertools.islice(self._load_E, self._window_size))
        window = len(waiting)
        wanted = min(window, self._batch_size if batch_size is None else batch_size)
        if wanted == 0:
            return []
        indices = list(range(window))
        if wanted < window:
            indices = self._choose(waiting, wanted, running_E)
        tickets = [waiting[index] for index in indices]
        self.choice = Choice(tickets, window, passed_over=max(indices) + 1 - wanted)
        for ticket in tickets:
            del self._load_E[ticket]
        return tickets

    def _choose(self, waiting: Sequence[int], wanted: int, running_E: Loads | None) -> list[int]:
        window_WE = np.array([self._load_E[ticket] for ticket in waiting], dtype=np.float64)
        chosen = self._strategy.select(window_WE, wanted, self._rng, Context(running_E))
        indices: list[int] = np.asarray(chosen, dtype=np.int64).tolist()
        distinct = set(indices)
        if (
            len(indices) != wanted
            or len(distinct) != wanted
            or 0 not in distinct
            or min(distinct) < 0
            or max(distinct) >= len(window_WE)
        ):
            raise ConfigError(
                f"strategy {self._strategy.name!r} chose {indices} of {len(window_WE)} requests: "
                f"it must choose {wanted} different ones, including the oldest (0)"
            )
        return indices
