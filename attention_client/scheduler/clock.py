"""The other schedule: when first-come-first-served would finish each request, by predicted costs.

Its time is *work*: the predicted seconds of all batches that have been dispatched, so no clock is read.
Both schedules begin at the same work and have the same requests. As the real one saves time by cheaper
batches, the other falls behind it, and what it is behind may be spent on being late.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from attention_client.scheduler.cost import CostModel, Loads

__all__ = ["FcfsClock"]

Rows = npt.NDArray[np.int64]

# Of the moving average of batch times, what a new batch counts.
_FRESH = 0.05
_FEW = 64


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
        self._work_s = 0.0
        self._usual_s = 0.0
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

    @property
    def usual_s(self) -> float:
        """Predicted seconds of the real schedule's batches: a moving average."""
        return self._usual_s

    def arrive(self, row: int, load_E: Loads) -> None:
        """A request has come."""
        if row >= len(self._batch_N):
            more = row + 1
            self._came_s_N = np.concatenate((self._came_s_N, np.zeros(more)))
            self._batch_N = np.concatenate((self._batch_N, np.zeros(more, dtype=np.int64)))
        self._waiting += 1
        self._came_s_N[row] = self._work_s
        self._batch_N[row] = self._full
        self._load_E += load_E
        self._filled += 1
        if self._filled == self._batch_size:
            self._end_batch()

    def look(self, rows: Rows) -> tuple[Loads, Loads]:
        """Of those requests: predicted seconds until they would be finished, and of their wait and run in
        all.

        Infinite for those of a batch that is not full yet.
        """
        end_s = self._end_s_B[self._batch_N[rows]]
        return end_s - self._work_s, end_s - self._came_s_N[rows]

    def dispatch(self, requests: int, batch_s: float) -> None:
        """The real schedule has taken so many, for a batch of that predicted time."""
        self._work_s += batch_s
        self._usual_s += (batch_s - self._usual_s) * (_FRESH if self._usual_s else 1.0)
        self.forget(requests)

    def forget(self, requests: int) -> None:
        """So many wait no more. With nobody waiting, both schedules are the same again."""
        self._waiting -= requests
        if not self._waiting:
            self._last_end_s = self._work_s
            self._end_s_B[: self._full] = np.inf
            self._full = self._filled = 0
            self._load_E[:] = 0

    def _end_batch(self) -> None:
        self._last_end_s = max(self._last_end_s, self._work_s) + self._cost.batch_s(self._load_E)
        self._end_s_B[self._full] = self._last_end_s
        self._full += 1
        if self._full == len(self._end_s_B):
            self._end_s_B = np.concatenate((self._end_s_B, np.full(self._full, np.inf)))
        self._load_E[:] = 0
        self._filled = 0
