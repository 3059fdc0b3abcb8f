"""The queue before the engine. Pure state machine (no I/O, no clock), the same live and in simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from attention_client.scheduler.clock import FcfsClock
from attention_client.scheduler.cost import CostModel, Loads
from attention_client.scheduler.strategies.base import Context, Indices, SelectionStrategy, first
from eaas.errors import ConfigError

__all__ = ["Choice", "RequestQueue"]

_FIRST_ROWS = 64


@dataclass(frozen=True, slots=True)
class Choice:
    """One batch taken from the queue.

    Attributes:
        number: Number of this choice, from 0.
        tickets: The chosen requests, in the order chosen.
        window: Requests to choose from (W).
        passed_over: Requests of the window that keep waiting while a younger one goes.
        predicted_s: Predicted seconds of the batch; 0 unless the strategy `needs_fcfs`.
    """

    number: int
    tickets: list[int]
    window: int
    passed_over: int
    predicted_s: float

    @property
    def oldest(self) -> bool:
        """Whether these are the oldest requests."""
        return not self.passed_over


def _ignore(**_event: object) -> None:
    """Record nothing."""


class RequestQueue:
    """Waiting requests, oldest first, from which a strategy takes the next batch.

    Args:
        strategy: Chooses.
        num_experts: E, the length of a load vector.
        batch_size: Requests of a full batch.
        window_size: Oldest requests that the strategy may choose from.
        cost: Predicts the time of a batch, for strategies that use it.
        seed: Seed of the strategy's random numbers.
        note: Called with each event, as keyword arguments (`recording.py`).

    Attributes:
        choice: The last choice; None before the first.

    Raises:
        ConfigError: The window is smaller than a batch, or a number is not positive.
    """

    def __init__(
        self,
        strategy: SelectionStrategy,
        num_experts: int,
        *,
        batch_size: int,
        window_size: int,
        cost: CostModel,
        seed: int | Sequence[int] = 0,
        note: Callable[..., None] | None = None,
    ) -> None:
        if batch_size < 1 or num_experts < 1:
            raise ConfigError(f"batch size {batch_size}, {num_experts} experts: must be at least 1")
        if window_size < batch_size:
            raise ConfigError(
                f"window of {window_size} requests: smaller than a batch of {batch_size}, "
                "which could never be filled"
            )
        self._strategy = strategy
        self._batch_size, self._window_size = batch_size, window_size
        self._cost = cost
        self._rng = np.random.default_rng(seed)
        self._note = note or _ignore
        self._clock = FcfsClock(cost, num_experts, batch_size) if strategy.needs_fcfs else None
        # A request has a rising ticket and, while it waits, a row of `_load_NE`.
        self._load_NE = np.zeros((_FIRST_ROWS, num_experts))
        self._free = list(range(_FIRST_ROWS))
        self._tickets: list[int] = []
        self._rows: list[int] = []
        self._next = 0
        self.choice: Choice | None = None

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, load_E: Loads) -> int:
        """Queue a request.

        Args:
            load_E: Predicted tokens on each expert; finite and not negative.

        Returns:
            Its ticket, one more than the last one.
        """
        if not self._free:
            rows = len(self._load_NE)
            self._load_NE = np.concatenate((self._load_NE, np.zeros_like(self._load_NE)))
            self._free = list(range(rows, 2 * rows))
        row = self._free.pop()
        self._load_NE[row] = load_E
        ticket = self._next
        self._next += 1
        self._tickets.append(ticket)
        self._rows.append(row)
        if self._clock is not None:
            self._clock.arrive(row, load_E)
        self._note(add=ticket, load=load_E)
        return ticket

    def remove(self, ticket: int) -> None:
        """Remove a cancelled request. Raises ValueError if it does not wait."""
        place = self._tickets.index(ticket)
        del self._tickets[place]
        self._free.append(self._rows.pop(place))
        if self._clock is not None:
            self._clock.forget(1)
        self._note(remove=ticket)

    def price(self, cost: CostModel) -> None:
        """Use another cost model from now on: the placement has changed."""
        self._cost = cost
        if self._clock is not None:
            self._clock.price(cost)
        self._note(price=cost)

    def use(self, strategy: SelectionStrategy) -> None:
        """Use another strategy from now on; it must not need `fcfs` if the first one did not."""
        self._strategy = strategy
        self._note(use=strategy.name)

    def take(self, batch_size: int | None = None, running_E: Loads | None = None) -> list[int]:
        """Take the next batch out.

        Args:
            batch_size: Most requests to take; None: a full batch.
            running_E: Load that runs already and goes on.

        Returns:
            The chosen tickets, in the order chosen.

        Raises:
            ConfigError: The strategy broke its contract.
        """
        tickets = self._take(batch_size, running_E)
        self._note(take=tickets, room=batch_size, running=running_E)
        return tickets

    def _take(self, batch_size: int | None, running_E: Loads | None) -> list[int]:
        window = min(len(self._tickets), self._window_size)
        wanted = min(window, self._batch_size if batch_size is None else batch_size)
        if wanted == 0:
            return []
        rows_W = np.array(self._rows[:window])
        window_WE = self._load_NE[rows_W]
        all_go = wanted == window
        chosen = first(window) if all_go else self._choose(window_WE, rows_W, wanted, running_E)
        indices = chosen.tolist()
        tickets = [self._tickets[index] for index in indices]
        predicted_s = 0.0
        if self._clock is not None:
            # Without what runs already: its time belongs to other batches.
            predicted_s = self._cost.choose(window_WE, None, chosen, wanted)
            self._clock.dispatch(wanted, predicted_s, oldest=max(indices) == wanted - 1)
        number = self.choice.number + 1 if self.choice is not None else 0
        passed_over = max(indices) + 1 - wanted
        self.choice = Choice(number, tickets, window, passed_over, predicted_s)
        for index in sorted(indices, reverse=True):
            del self._tickets[index]
            self._free.append(self._rows.pop(index))
        return tickets

    def observe(self, batch_s: float, choice: Choice | None = None) -> None:
        """Record the true cost of a batch.

        Args:
            batch_s: Seconds by the cost model for the batch's true load.
            choice: The batch; None: the last one.
        """
        known = choice or self.choice
        if known is None:
            return
        if self._clock is not None:
            self._clock.observe(batch_s, known.predicted_s, known.oldest)
        self._note(observe=batch_s, choice=known.number)

    def _choose(
        self, window_WE: Loads, rows_W: Indices, wanted: int, running_E: Loads | None
    ) -> Indices:
        fcfs = None if self._clock is None else self._clock.view(rows_W)
        context = Context(self._cost, running_E, self._window_size, fcfs)
        answer = self._strategy.select(window_WE, wanted, self._rng, context)
        chosen = np.ascontiguousarray(answer, dtype=np.int64)
        indices = chosen.tolist()
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
        return chosen
