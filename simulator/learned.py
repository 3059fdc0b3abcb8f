"""ScalpeLB with knobs that were learned, in a replay: it looks at each window before it plans."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from balancer.live.learned import LearnedKnobs, features
from balancer.policies.problem import make_problem
from balancer.policies.scalpel import scalpel
from balancer.policies.types import Holds, Plan, make_plan

__all__ = ["LEARNED", "LearnedPlanner"]

LEARNED = "scalpel-learned"
"""What it is called in a comparison."""


class LearnedPlanner:
    """A `Planner`. Looking at the window is planning, too.

    Args:
        knobs: The network.
        servers, slots: As for `replay`.
    """

    def __init__(self, knobs: LearnedKnobs, servers: int, slots: int) -> None:
        self._knobs = knobs
        self._servers, self._slots = servers, slots
        self._is_first = True

    def step(
        self, counts_WLE: npt.NDArray[Any], load_LE: npt.NDArray[np.float64], current_LSE: Holds
    ) -> Callable[[], Plan]:
        """See `Planner`."""

        def plan() -> Plan:
            knobs: dict[str, Any] = self._knobs(features(counts_WLE, self._servers, self._slots))
            problem = make_problem(load_LE, self._servers, self._slots, current_LSE)
            layout = scalpel(problem, window_WLE=counts_WLE, anew=self._is_first, **knobs)
            self._is_first = False
            return make_plan(LEARNED, problem, *layout)

        return plan
