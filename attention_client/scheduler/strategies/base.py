"""Interface of a selection strategy, which chooses the next batch; for this package and third parties.

Letters: W requests of the window, B batch size, E logical experts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from attention_client.scheduler.cost import CostModel

__all__ = ["Context", "FcfsView", "Indices", "Loads", "SelectionStrategy", "first"]

Loads = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FcfsView:
    """Predicted first-come-first-served schedule of the waiting requests (`FcfsClock`).

    Attributes:
        left_W: Seconds until each request of the window would finish in it, float64 (W,). Zero or negative if
            it would be finished already; infinite while unknown.
        wait_W: Seconds that each request would wait and run in it, float64 (W,); infinite while unknown.
        usual_s: Moving average of the real schedule's batch times; 0 before the first batch.
        bias: Observed over predicted time of chosen batches, relative to batches of the oldest requests.
        growing: Whether the queue grows by more than chance.
    """

    left_W: Loads
    wait_W: Loads
    usual_s: float
    bias: float
    growing: bool = False


@dataclass(frozen=True, slots=True)
class Context:
    """Information for a strategy in addition to the window.

    Attributes:
        cost: Predicts the time of a batch. None: unknown.
        running_E: Load of requests that continue to run, float64 (E,). None: nothing runs.
        depth: Most requests in a window; it holds fewer only if fewer wait.
        fcfs: First-come-first-served schedule. None unless the strategy `needs_fcfs`.
    """

    cost: CostModel | None = None
    running_E: Loads | None = None
    depth: int = 0
    fcfs: FcfsView | None = None


class SelectionStrategy(ABC):
    """Chooses which waiting requests run together in the next batch.

    To add one, subclass this in your own package, set `name`, and register the class under that name as an
    entry point of the group `eaas.strategies`:

        [project.entry-points."eaas.strategies"]
        mine = "my_package:Mine"

    Every command then accepts that name. The class is instantiated without arguments.

    Attributes:
        name: Name of the strategy.
        needs_fcfs: Whether it needs `Context.fcfs`, which costs a few microseconds per request.
        needs_loads: Whether it reads loads; if not, none are predicted.
    """

    name: ClassVar[str]
    needs_fcfs: ClassVar[bool] = False
    needs_loads: ClassVar[bool] = True

    @abstractmethod
    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """Choose the requests of the next batch. Called by `RequestQueue` if more requests wait than fit.

        Must be pure (no clock, no I/O, no state between calls, randomness only from `rng`), so that a
        replayed queue makes the same choices.

        Args:
            window_WE: Predicted tokens of each waiting request on each expert, float64 (W, E),
                C-contiguous, oldest first. Finite and not negative. Read-only.
            batch_size: Requests wanted, at least 1.
            rng: The only source of randomness.
            context: Costs, running load and schedule.

        Returns:
            min(W, batch_size) different indices into the window, int64. They must include 0, the oldest
            request, so that no request waits for ever.
        """


def first(count: int) -> Indices:
    """Return the window's indices of the oldest `count` requests: first come, first served."""
    return np.arange(count, dtype=np.int64)
