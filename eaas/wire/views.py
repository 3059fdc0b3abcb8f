"""A cache of slot views in client and server: making views takes longer than all else in a small request.

Letters: T tokens, H hidden size, K experts per token (top-k).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from eaas.wire.arena import Arena
from eaas.wire.slot import result_view

__all__ = ["SlotViews"]

# Limit of cached sets of views, about 2 KB each. The cache is cleared when it is full.
_MOST_CACHED = 2048


class SlotViews:
    """Cached NumPy views of an arena's slots. They keep the arena's memory alive.

    Args:
        arena: The arena.
        hidden_size: H.

    Attributes:
        made: Number of sets of views made so far.
    """

    def __init__(self, arena: Arena, hidden_size: int) -> None:
        self._arena = arena
        self._hidden_size = hidden_size
        self._results: dict[tuple[int, int], npt.NDArray[np.float32]] = {}
        self.made = 0

    def result(self, slot: int, rows: int) -> npt.NDArray[np.float32]:
        """Return a view of a request's result (T, H): for the server to fill, or the client to read."""
        key = (slot, rows)
        result_TH = self._results.get(key)
        if result_TH is None:
            offset = self._arena.result_offset(slot)
            result_TH = result_view(self._arena.buffer, offset, rows, self._hidden_size)
            self._keep(self._results, key, result_TH)
        return result_TH

    def clear(self) -> None:
        """Drop all cached views of slots, so that closing the arena can free its memory."""
        self._results.clear()

    def _keep(self, cached: dict[Any, Any], key: Any, views: Any) -> None:
        if len(cached) >= _MOST_CACHED:
            cached.clear()
        cached[key] = views
        self.made += 1
