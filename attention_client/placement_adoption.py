"""Decide when a client's layer calls switch to a newer placement. Pure state machine (no I/O, no clock)."""

from __future__ import annotations

from collections.abc import Container

import numpy as np
import numpy.typing as npt

from eaas.types import Placement

__all__ = ["PlacementSwitch"]


class PlacementSwitch:
    """Holds a newer placement back until this client is connected to the servers that it needs.

    A placement may include a new server before this client has slots there. If that server alone holds some
    experts, switching would make them unreachable. The older placement still reaches them: servers keep its
    experts until this client acknowledges the newer one.

    Args:
        patience_s: Longest time for which newer placements are held back, however many come.

    Attributes:
        current: Placement in use; None before the first one.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._next: Placement | None = None
        self._since = 0.0
        self.current: Placement | None = None

    def offer(self, placement: Placement, now: float) -> bool:
        """Hold a placement from the balancer for `advance`. Drops it and returns False if not newer."""
        newest = self._next or self.current
        if newest is not None and placement.epoch <= newest.epoch:
            return False
        if self._next is None:
            self._since = now
        self._next = placement
        return True

    def advance(self, connected: Container[str], now: float) -> bool:
        """Switch to the newest placement if this loses no reachable expert, or if patience has ended.

        Called after each change of connections or placement, and when patience ends.

        Args:
            connected: Servers with a live connection.
            now: Monotonic seconds.

        Returns:
            Whether `current` changed.
        """
        if self._next is None:
            return False
        if self.current is not None and now < self._since + self._patience_s:
            lost_LE = _covered(self.current, connected) & ~_covered(self._next, connected)
            if lost_LE.any():
                return False
        self.current, self._next = self._next, None
        return True

    def due_at(self) -> float | None:
        """Return when patience ends, for a timer (monotonic seconds); None if no placement is held back."""
        return None if self._next is None else self._since + self._patience_s


def _covered(placement: Placement, connected: Container[str]) -> npt.NDArray[np.bool_]:
    """Return whether each expert has a connected replica: bool (L, E)."""
    can_S = np.array([s in connected for s in placement.servers], dtype=np.bool_)
    return np.asarray(placement.replicas.count_LE(can_S) > 0)
