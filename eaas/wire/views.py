"""Views of slots that are made once and used again: what is asked for in one call is asked for in the next
thousand, and to make them takes longer than all else that is done for a small request.

Letters: T tokens, H hidden size, K experts per token (top-k).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from eaas.wire.arena import Arena
from eaas.wire.header import RequestHeader
from eaas.wire.slot import request_views, result_view

__all__ = ["PayloadArrays", "SlotViews"]

PayloadArrays = tuple[npt.NDArray[Any], npt.NDArray[np.int32], npt.NDArray[np.float32]]
"""Hidden states (T, H), bfloat16 seen as uint16; expert ids (T, K); scores (T, K)."""

# Sets of views that are kept, about 2 KB each. When there are more shapes than that, all are made anew.
_KEPT = 2048


class SlotViews:
    """Views of an arena's slots, without a copy. The arena's memory goes with the last of them.

    Args:
        arena: Either side's.
        hidden_size: H.

    Attributes:
        made: How many sets of views were made so far.
    """

    def __init__(self, arena: Arena, hidden_size: int) -> None:
        self._arena = arena
        self._hidden_size = hidden_size
        self._payloads: dict[tuple[int, int, int, int], PayloadArrays] = {}
        self._results: dict[tuple[int, int], npt.NDArray[np.float32]] = {}
        self.made = 0

    def payload(self, slot: int, header: RequestHeader) -> PayloadArrays:
        """Of a request that passed `validate_request`, or of one's own."""
        key = (slot, header.batch_size, header.top_k, header.dtype)
        arrays = self._payloads.get(key)
        if arrays is None:
            offset = self._arena.request_offset(slot)
            arrays = request_views(self._arena.buffer, offset, header)
            self._keep(self._payloads, key, arrays)
        return arrays

    def result(self, slot: int, rows: int) -> npt.NDArray[np.float32]:
        """Of the result (T, H) that belongs to such a request."""
        key = (slot, rows)
        result_TH = self._results.get(key)
        if result_TH is None:
            offset = self._arena.result_offset(slot)
            result_TH = result_view(self._arena.buffer, offset, rows, self._hidden_size)
            self._keep(self._results, key, result_TH)
        return result_TH

    def clear(self) -> None:
        """Let go of the arena's memory."""
        self._payloads.clear()
        self._results.clear()

    def _keep(self, kept: dict[Any, Any], key: Any, views: Any) -> None:
        if len(kept) >= _KEPT:
            kept.clear()
        kept[key] = views
        self.made += 1
