"""Which placement calls follow: the newest, as soon as nothing is lost by that. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Container

import numpy as np
import numpy.typing as npt

from eaas.types import Placement

__all__ = ["PlacementSwitch"]


class PlacementSwitch:
    """Holds a newer placement back while this client is not connected to the servers that it needs.

    A server that joined may be in a placement before this client has its slots. Experts that only it
    holds would be out of reach for that moment, and in reach by the placement before, whose experts
    servers keep until this client has acknowledged the newer one.

    Args:
        patience_s: Longest time that a placement is held back.

    Attributes:
        current: What calls follow; None before the first one.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._next: Placement | None = None
        self._since = 0.0
        self.current: Placement | None = None

    def offer(self, placement: Placement, now: float) -> bool:
        """There is a placement. Says whether it is newer than what is known."""
        newest = self._next or self.current
        if newest is not None and placement.epoch <= newest.epoch:
            return False
        self._next, self._since = placement, now
        return True

    def look(self, connected: Container[str], now: float) -> bool:
        """Takes the newest up where that is right.

        Args:
            connected: Servers that can be asked.
            now: Monotonic seconds.

        Returns:
            Whether `current` is another one now.
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
        """When patience ends; None where nothing is held back."""
        return None if self._next is None else self._since + self._patience_s


def _covered(placement: Placement, connected: Container[str]) -> npt.NDArray[np.bool_]:
    """Experts with a replica that can be asked: bool (L, E)."""
    can_S = np.array([s in connected for s in placement.servers], dtype=np.bool_)
    return np.asarray(placement.holds_LSE[:, can_S].any(axis=1))
