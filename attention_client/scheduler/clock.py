"""Reference schedule: when first-come-first-served would finish each request, by predicted costs.

Its time is *work*: the predicted seconds of all dispatched batches. No clock is read. Both schedules start at
the same work and have the same requests. Cheaper batches put the real schedule ahead of the reference, and
requests may be late by that lead.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from attention_client.scheduler.cost import CostModel, Loads
from attention_client.scheduler.strategies.base import FcfsView

__all__ = ["FcfsClock"]

Rows = npt.NDArray[np.int64]

# Weight of a new batch in the moving averages.
_SMOOTHING = 0.05
# Share of the chosen batches' bias that each batch of the oldest requests forgets. Small: close to capacity,
# hundreds of such batches come between two choices, and the bias should survive them.
_BIAS_DECAY = 0.001
_FIRST_ROWS = 64
# The queue grows beyond chance if it gained this many standard deviations of a Poisson process since it was
# short. Found by `python -m benchmarks.caps judge`.
_DEVIATIONS = 3.0


class FcfsClock:
    """First-come-first-served in batches of a fixed size, next to the real schedule.

    Each waiting request has a row: a small number, reused after it leaves.

    Args:
        cost: Predicts the time of a batch.
        num_experts: E.
        batch_size: Requests of a batch.
    """

    def __init__(self, cost: CostModel, num_experts: int, batch_size: int) -> None:
        self._cost = cost
        self._batch_size = batch_size
        self._waiting = 0
        # Arrivals and departures since at most a batch waited.
        self._came = self._gone = 0
        self._work_s = 0.0
        self._usual_s = 0.0
        # Observed over predicted time, for batches of the oldest requests and for chosen ones. Imperfect
        # predictions put the latter above 1: a strategy prefers requests that were predicted too low.
        self._bias_oldest = self._bias_chosen = 1.0
        # For each row: work at the request's arrival, and its batch in this schedule.
        self._came_s_N = np.zeros(_FIRST_ROWS)
        self._batch_N = np.zeros(_FIRST_ROWS, dtype=np.int64)
        # For each batch: work at its end, infinite until it is full; the last full batch's end, and the
        # number of full batches.
        self._end_s_B = np.full(_FIRST_ROWS, np.inf)
        self._last_end_s = 0.0
        self._full = 0
        # The batch being filled.
        self._load_E = np.zeros(num_experts)
        self._filled = 0

    def arrive(self, row: int, load_E: Loads) -> None:
        """Add a request."""
        if row >= len(self._batch_N):
            more = row + 1
            self._came_s_N = np.concatenate((self._came_s_N, np.zeros(more)))
            self._batch_N = np.concatenate((self._batch_N, np.zeros(more, dtype=np.int64)))
        self._waiting += 1
        self._came += 1
        self._came_s_N[row] = self._work_s
        self._batch_N[row] = self._full
        self._load_E += load_E
        self._filled += 1
        if self._filled == self._batch_size:
            self._end_batch()

    def view(self, rows: Rows) -> FcfsView:
        """The schedule of these requests."""
        end_s = self._end_s_B[self._batch_N[rows]]
        return FcfsView(
            end_s - self._work_s,
            end_s - self._came_s_N[rows],
            self._usual_s,
            self._bias_chosen / self._bias_oldest,
            self._came - self._gone >= _DEVIATIONS * math.sqrt(max(self._gone, 1)),
        )

    def dispatch(self, requests: int, batch_s: float, oldest: bool) -> None:
        """Record a batch of the real schedule: its size, predicted time, and whether it held the oldest."""
        batch_s *= self._bias_oldest if oldest else self._bias_chosen
        self._work_s += batch_s
        self._usual_s += (batch_s - self._usual_s) * (_SMOOTHING if self._usual_s else 1.0)
        self.forget(requests)

    def price(self, cost: CostModel) -> None:
        """Use another cost model for batches filled from now on."""
        self._cost = cost

    def observe(self, batch_s: float, predicted_s: float, oldest: bool) -> None:
        """Record the true time of a batch, of the oldest requests or of chosen ones."""
        if not predicted_s:
            return
        bias = batch_s / predicted_s
        if oldest:
            self._bias_oldest += (bias - self._bias_oldest) * _SMOOTHING
            self._bias_chosen += (self._bias_oldest - self._bias_chosen) * _BIAS_DECAY
        else:
            self._bias_chosen += (bias - self._bias_chosen) * _SMOOTHING

    def forget(self, requests: int) -> None:
        """Remove requests. With an empty queue, both schedules are equal again."""
        self._waiting -= requests
        self._gone += requests
        if self._waiting <= self._batch_size:
            self._came = self._gone = 0
        if not self._waiting:
            self._last_end_s = self._work_s
            self._end_s_B[: self._full] = np.inf
            self._full = self._filled = 0
            self._load_E[:] = 0

    def _end_batch(self) -> None:
        batch_s = self._cost.batch_s(self._load_E) * self._bias_oldest
        self._last_end_s = max(self._last_end_s, self._work_s) + batch_s
        self._end_s_B[self._full] = self._last_end_s
        self._full += 1
        if self._full == len(self._end_s_B):
            self._end_s_B = np.concatenate((self._end_s_B, np.full(self._full, np.inf)))
        self._load_E[:] = 0
        self._filled = 0
