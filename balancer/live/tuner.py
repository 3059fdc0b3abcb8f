"""Sets knobs while the balancer runs: the live side of `control`, and of knobs that were learned. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from balancer.live.control import Control, Signals, control

__all__ = ["ControlLoop", "Looked", "Tuned", "Tuner"]

_USUAL_DRIFT_TOL = 0.2


@dataclass(frozen=True, eq=False)
class Looked:
    """What a tuner is shown.

    Attributes:
        window_WLE: Tokens by step; W is 2 at least.
        servers: S.
        slots: Replicas per layer that policies may place.
        signals: What else is known.
    """

    window_WLE: npt.NDArray[np.int64]
    servers: int
    slots: int
    signals: Signals


@dataclass(frozen=True)
class Tuned:
    """What is in force from now on.

    Attributes:
        knobs: Of the policy, by name; those that it does not have are of no effect.
        link_part: Of the links' rate, what loads may count on.
        drift_part: Of the configured drift tolerance.
        reasons: Why it is not what it was; empty where it is.
    """

    knobs: Mapping[str, Any]
    link_part: float = 1.0
    drift_part: float = 1.0
    reasons: tuple[str, ...] = ()


class Tuner(Protocol):
    """Whoever sets knobs."""

    def look(self, looked: Looked) -> Tuned:
        """The load has been looked at for a while."""


class ControlLoop:
    """The hand-written one."""

    def __init__(self) -> None:
        self._state = Control()

    def look(self, looked: Looked) -> Tuned:
        """See `control`."""
        spare = looked.slots > looked.window_WLE.shape[2]
        self._state, knobs, reasons = control(self._state, looked.signals, spare_slots=spare)
        return Tuned(
            knobs=knobs.scalpel(),
            link_part=knobs.link_part,
            drift_part=knobs.drift_tol / _USUAL_DRIFT_TOL,
            reasons=reasons,
        )
