"""The interface of a selection strategy, for those here and those of third parties.

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
    """The schedule that first-come-first-served would have made, as far as it is predicted (`FcfsClock`).

    Attributes:
        left_W: Seconds until each request of the window would be finished there, float64 (W,). Not positive
            for one that would be finished already; infinite where that is not known yet.
        wait_W: Seconds that each would wait and run there, likewise.
        usual_s: Seconds of the batches that the real schedule has run, a moving average; 0 before the first.
        bias: How much longer than predicted chosen batches turn out, relative to batches of the oldest.
        growing: Whether more requests wait than since the queue was short would by chance.
    """

    left_W: Loads
    wait_W: Loads
    usual_s: float
    bias: float
    growing: bool = False


@dataclass(frozen=True, slots=True)
class Context:
    """What a strategy may know beside the window. A strategy of loads alone needs none of it.

    Attributes:
        cost: Predicts the time of a batch, through the placement where there is one. None: not known.
        running_E: Load of what runs already and goes on beside the new batch, float64 (E,). None: nothing.
        depth: Requests that a window holds at most; fewer are in it only if no more are waiting.
        fcfs: What first-come-first-served would have done. None unless the strategy `needs_fcfs`.
    """

    cost: CostModel | None = None
    running_E: Loads | None = None
    depth: int = 0
    fcfs: FcfsView | None = None


class SelectionStrategy(ABC):
    """Chooses which waiting requests run together.

    To add one: subclass this in a package of your own, give it a `name`, and register the class under that
    name as an entry point of the group `eaas.strategies`:

        [project.entry-points."eaas.strategies"]
        mine = "my_package:Mine"

    It is then known to every command by that name. It is made without arguments.

    Attributes:
        name: By which it is chosen.
        needs_fcfs: Whether the context is to have `fcfs`, which takes a few microseconds a request.
        needs_loads: Whether it looks at loads; if not, nobody predicts them.
    """

    name: ClassVar[str]
    needs_fcfs: ClassVar[bool] = False
    needs_loads: ClassVar[bool] = True

    @abstractmethod
    def select(
        self, window_WE: Loads, batch_size: int, rng: np.random.Generator, context: Context
    ) -> Indices:
        """The requests of the next batch.

        Pure: no clock, no input or output, nothing kept from call to call but options; chance comes from
        `rng` alone. So the same queue gives the same choices again.

        Args:
            window_WE: Predicted tokens of each waiting request on each expert, float64 (W, E),
                C-contiguous, oldest first. Finite and not negative. Not to be written to.
            batch_size: Requests wanted, at least 1.
            rng: The only source of chance.
            context: What else is known.

        Returns:
            min(W, batch_size) different indices into the window, int64. Index 0, the oldest request, is
            always among them: that is what keeps every request from waiting for ever.
        """


def first(count: int) -> Indices:
    """The oldest so many."""
    return np.arange(count, dtype=np.int64)
