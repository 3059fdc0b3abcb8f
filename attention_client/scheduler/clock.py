"""The other schedule: when first-come-first-served would finish each request, by predicted costs.

Its time is *work*: the predicted seconds of all batches that have been dispatched, so no clock is read.
Both schedules begin at the same work and have the same requests. As the real one saves time by cheaper
batches, the other falls behind it, and what it is behind may be spent on being late.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from attention_client.scheduler.cost import CostModel, Loads
from attention_client.scheduler.strategies.base import FcfsView

__all__ = ["FcfsClock"]

Rows = npt.NDArray[np.int64]

# What a new batch counts in the moving averages; and of the bias of chosen batches, what is forgotten with
# each batch that was not chosen, so that a bad time for choosing passes. Not soon: close to capacity there
# are hundreds of such batches between two times of choosing, and it would have to be learned anew each time.
_FRESH = 0.05
_FORGOTTEN = 0.001
_FEW = 64
# A queue grows by more than chance if it has as many standard deviations of a Poisson process more requests
# than when it was short. Found by `eaas simulate policy`.
_DEVIATIONS = 3.0


class FcfsClock:
    """First-come-first-served in batches of a fixed size, beside the real schedule.

    A waiting request is known by its row: a small number that is its own while it waits.

    Args:
        cost: Predicts a batch's time.
        num_experts: E.
        batch_size: Requests of a batch.
    """

    def __init__(self, cost: CostModel, num_experts: int, batch_size: int) -> None:
        self._cost = cost
        self._batch_size = batch_size
        self._waiting = 0
        # Since no more than a batch waited.
        self._came = self._gone = 0
        self._work_s = 0.0
        self._usual_s = 0.0
        # What was observed over what was predicted, of batches of the oldest requests and of the others:
        # above 1 for the others where predictions are not perfect, since what is chosen is what was predicted
        # too low.
        self._bias_oldest = self._bias_chosen = 1.0
        # Of each row: the work when its request came, and its batch in this schedule.
        self._came_s_N = np.zeros(_FEW)
        self._batch_N = np.zeros(_FEW, dtype=np.int64)
        # Of each batch: the work at its end; infinite while it is not full. The last full one's, and how
        # many are full.
        self._end_s_B = np.full(_FEW, np.inf)
        self._last_end_s = 0.0
        self._full = 0
        # The batch that is being filled.
        self._load_E = np.zeros(num_experts)
        self._filled = 0

    def arrive(self, row: int, load_E: Loads) -> None:
        """A request has come."""
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

    def look(self, rows: Rows) -> FcfsView:
        """The schedule for those requests."""
        end_s = self._end_s_B[self._batch_N[rows]]
        return FcfsView(
            end_s - self._work_s,
            end_s - self._came_s_N[rows],
            self._usual_s,
            self._bias_chosen / self._bias_oldest,
            self._came - self._gone >= _DEVIATIONS * math.sqrt(max(self._gone, 1)),
        )

    def dispatch(self, requests: int, batch_s: float, oldest: bool) -> None:
        """The real schedule has taken so many, the oldest or others, for a batch of that predicted time."""
        batch_s *= self._bias_oldest if oldest else self._bias_chosen
        self._work_s += batch_s
        self._usual_s += (batch_s - self._usual_s) * (_FRESH if self._usual_s else 1.0)
        self.forget(requests)

    def price(self, cost: CostModel) -> None:
        """Batches that are filled from now on take what this model says."""
        self._cost = cost

    def observe(self, batch_s: float, predicted_s: float, oldest: bool) -> None:
        """A batch, of the oldest requests or of others, has taken that long, not what was predicted."""
        if not predicted_s:
            return
        bias = batch_s / predicted_s
        if oldest:
            self._bias_oldest += (bias - self._bias_oldest) * _FRESH
            self._bias_chosen += (self._bias_oldest - self._bias_chosen) * _FORGOTTEN
        else:
            self._bias_chosen += (bias - self._bias_chosen) * _FRESH

    def forget(self, requests: int) -> None:
        """So many wait no more. With nobody waiting, both schedules are the same again."""
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
