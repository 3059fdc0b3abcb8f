"""The queue before the engine: a state machine without clock or I/O, the same live and in simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from attention_client.scheduler.clock import FcfsClock
from attention_client.scheduler.cost import CostModel, Loads
from attention_client.scheduler.strategies.base import Context, Indices, SelectionStrategy, first
from eaas.errors import ConfigError

__all__ = ["Choice", "RequestQueue"]

_FEW = 64


@dataclass(frozen=True, slots=True)
class Choice:
    """What was taken out at a time.

    Attributes:
        number: Of this choice in the life of the queue, from 0.
        tickets: The chosen requests, in the order chosen.
        window: Requests that there were to choose from (W).
        passed_over: Requests of the window that wait on while a younger one goes.
        predicted_s: The predicted time of the batch, in seconds; 0 unless the strategy `needs_fcfs`.
    """

    number: int
    tickets: list[int]
    window: int
    passed_over: int
    predicted_s: float

    @property
    def oldest(self) -> bool:
        """Whether these are the oldest requests: nobody was passed over."""
        return not self.passed_over


class RequestQueue:
    """Waiting requests, oldest first, of which a strategy takes the next batch.

    Args:
        strategy: Chooses.
        num_experts: E, the length of a load vector.
        batch_size: Requests of a full batch.
        window_size: Of the oldest requests, how many the strategy may choose from.
        cost: Predicts the time of a batch, for the strategies that use it.
        seed: Of the strategy's chance.

    Attributes:
        choice: What was taken last; None before the first.

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
        self._clock = FcfsClock(cost, num_experts, batch_size) if strategy.needs_fcfs else None
        # A request is a ticket, rising, and a row of `_load_NE` as long as it waits.
        self._load_NE = np.zeros((_FEW, num_experts))
        self._free = list(range(_FEW))
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
            Its ticket, one more than that of the request before.
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
        return ticket

    def remove(self, ticket: int) -> None:
        """Take a request out that is not to run any more. Raises ValueError if it does not wait."""
        place = self._tickets.index(ticket)
        del self._tickets[place]
        self._free.append(self._rows.pop(place))
        if self._clock is not None:
            self._clock.forget(1)

    def price(self, cost: CostModel) -> None:
        """From now on batches cost what this model says: the placement has changed."""
        self._cost = cost
        if self._clock is not None:
            self._clock.price(cost)

    def use(self, strategy: SelectionStrategy) -> None:
        """From now on this one chooses; one that `needs_fcfs` only where the first one did."""
        self._strategy = strategy

    def take(self, batch_size: int | None = None, running_E: Loads | None = None) -> list[int]:
        """Take the next batch out.

        Args:
            batch_size: Requests that there is room for; None: a full batch.
            running_E: Load of what runs already and goes on beside them.

        Returns:
            The tickets of the chosen ones, in the order chosen; as many as there is room for and are waiting.

        Raises:
            ConfigError: The strategy has broken its contract.
        """
        room = self._batch_size if batch_size is None else batch_size
        window = min(len(self._tickets), self._window_size)
        wanted = min(window, room)
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
            # Without what runs already: that is other batches' time.
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
        """Say what a batch has really cost: the cost model's seconds for its true load.

        Args:
            batch_s: See above.
            choice: Which batch; None: the last one.
        """
        known = choice or self.choice
        if self._clock is not None and known is not None:
            self._clock.observe(batch_s, known.predicted_s, known.oldest)

    def _choose(
        self, window_WE: Loads, rows_W: Indices, wanted: int, running_E: Loads | None
    ) -> Indices:
        fcfs = None if self._clock is None else self._clock.look(rows_W)
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
                f"{wanted} different ones are wanted, the oldest (0) among them"
            )
        return chosen
