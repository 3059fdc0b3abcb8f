"""Reference schedule of a live or simulated queue: when first come, first served would finish each request.

Its time is *work*: the predicted seconds of all dispatched batches. No clock is read. Both schedules start at
the same work and have the same requests. Cheaper batches put the real schedule ahead of the reference, and
requests may be delayed by up to that lead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from attention_client.scheduler.cost import CostModel, Loads
from attention_client.scheduler.strategies.base import FcfsView

__all__ = ["FcfsClock"]

# Weight of a new batch in the moving averages.
_SMOOTHING = 0.05
# Share of the chosen batches' bias that each batch of the oldest requests forgets. It is small because, close
# to capacity, hundreds of such batches come between two choices, and the bias should survive them.
_BIAS_DECAY = 0.001
# The queue grows by more than chance if it has gained this many standard deviations of a Poisson process
# since it was last short. Found by `python -m benchmarks.caps judge`.
_DEVIATIONS = 3.0


class FcfsClock:
    """Simulates first-come-first-served in batches of a fixed size, in parallel with the real schedule.

    Args:
        cost: Predicts the time of a batch.
        num_experts: E.
        batch_size: Requests of a batch.
    """

    def __init__(self, cost: CostModel, num_experts: int, batch_size: int) -> None:
        self._cost = cost
        self._batch_size = batch_size
        # Arrivals and departures since the queue last held at most one batch.
        self._came = self._gone = 0
        self._work_s = 0.0
        self._usual_s = 0.0
        # Observed over predicted time, for batches of the oldest requests and for chosen ones. Imperfect
        # predictions put the latter above 1, because a strategy prefers requests that were predicted too low.
        self._bias_oldest = self._bias_chosen = 1.0
        # For each waiting request: work at its arrival, and its batch in this schedule.
        self._waiting: dict[int, tuple[float, int]] = {}
        # Work at the end of each full batch, and of the last one.
        self._ends_s: list[float] = []
        self._last_end_s = 0.0
        # The batch being filled.
        self._load_E = np.zeros(num_experts)
        self._filled = 0

    def arrive(self, ticket: int, load_E: Loads) -> None:
        """Add a request that has arrived in the queue, with its predicted load, to the reference schedule."""
        self._came += 1
        self._waiting[ticket] = self._work_s, len(self._ends_s)
        self._load_E += load_E
        self._filled += 1
        if self._filled == self._batch_size:
            batch_s = self._cost.batch_s(self._load_E) * self._bias_oldest
            self._last_end_s = max(self._last_end_s, self._work_s) + batch_s
            self._ends_s.append(self._last_end_s)
            self._load_E[:] = 0
            self._filled = 0

    def view(self, tickets: Sequence[int]) -> FcfsView:
        """Return when first-come-first-served would finish these requests, which bounds their delay."""
        full = len(self._ends_s)
        known = [self._waiting[ticket] for ticket in tickets]
        came_s = np.array([came_s for came_s, _ in known])
        end_s = np.array([self._ends_s[batch] if batch < full else np.inf for _, batch in known])
        return FcfsView(
            end_s - self._work_s,
            end_s - came_s,
            self._usual_s,
            self._bias_chosen / self._bias_oldest,
            self._came - self._gone >= _DEVIATIONS * math.sqrt(max(self._gone, 1)),
        )

    def dispatch(self, tickets: Sequence[int], batch_s: float, oldest: bool) -> None:
        """Record a batch that the queue just took, with its predicted time: the real schedule's progress.

        Args:
            tickets: Its requests.
            batch_s: Predicted seconds.
            oldest: Whether these were the oldest requests.
        """
        batch_s *= self._bias_oldest if oldest else self._bias_chosen
        self._work_s += batch_s
        self._usual_s += (batch_s - self._usual_s) * (_SMOOTHING if self._usual_s else 1.0)
        self.forget(tickets)

    def price(self, cost: CostModel) -> None:
        """Replace the cost model after a change of placement, for batches filled from now on."""
        self._cost = cost

    def observe(self, batch_s: float, predicted_s: float, oldest: bool) -> None:
        """Learn from a batch's true time how to correct predictions, for oldest or for chosen requests."""
        if not predicted_s:
            return
        bias = batch_s / predicted_s
        if oldest:
            self._bias_oldest += (bias - self._bias_oldest) * _SMOOTHING
            self._bias_chosen += (self._bias_oldest - self._bias_chosen) * _BIAS_DECAY
        else:
            self._bias_chosen += (bias - self._bias_chosen) * _SMOOTHING

    def forget(self, tickets: Sequence[int]) -> None:
        """Remove requests that were taken or cancelled. Once none waits, both schedules are equal again."""
        for ticket in tickets:
            del self._waiting[ticket]
        self._gone += len(tickets)
        if len(self._waiting) <= self._batch_size:
            self._came = self._gone = 0
        if not self._waiting:
            self._last_end_s = self._work_s
            self._ends_s.clear()
            self._filled = 0
            self._load_E[:] = 0
