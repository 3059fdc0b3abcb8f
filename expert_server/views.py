"""Views of payloads and results that are made once and used again: what is asked for in one call is asked
for in the next thousand, and to make seven arrays and tensors takes longer than all else that is done for a
request.

Letters: T tokens, H hidden size, K experts per token (top-k).
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from eaas.wire import Arena, RequestHeader
from eaas.wire.header import REQUEST_HEADER_BYTES, WireDtype, payload_layout
from eaas.wire.slot import request_views, result_view

__all__ = ["PayloadViews", "Scratch", "SlotViews"]

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
# Sets of views that are kept, about 2 KB each. When there are more shapes than that, all are made anew.
_KEPT = 2048


@dataclass(frozen=True, eq=False, slots=True)
class PayloadViews:
    """The three sections of a payload, without a copy: `hidden` (T, H), ids and scores (T, K).

    Attributes:
        arrays: For copying. bfloat16, which NumPy lacks, is seen as uint16.
        tensors: The same memory, for computing.
    """

    arrays: tuple[npt.NDArray[Any], npt.NDArray[np.int32], npt.NDArray[np.float32]]
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, buffer: Any, offset: int, header: RequestHeader) -> PayloadViews:
        """Views of a payload whose header stands, or would stand, at `offset`; see `request_views`."""
        arrays = request_views(buffer, offset, header)
        x_TH, ids_TK, scores_TK = map(torch.from_numpy, arrays)
        if header.dtype == WireDtype.BFLOAT16:
            x_TH = x_TH.view(torch.bfloat16)
        return cls(arrays, (x_TH, ids_TK, scores_TK))


class SlotViews:
    """Views of an arena's slots.

    Args:
        arena: The server's arena.
        hidden_size: H.

    Attributes:
        made: How many sets of views were made so far.
    """

    def __init__(self, arena: Arena, hidden_size: int) -> None:
        self._arena = arena
        self._hidden_size = hidden_size
        self._payloads: dict[tuple[int, int, int, int], PayloadViews] = {}
        self._results: dict[tuple[int, int], npt.NDArray[np.float32]] = {}
        self.made = 0

    def payload(self, slot: int, header: RequestHeader) -> PayloadViews:
        """Of a request that passed `validate_request`."""
        key = (slot, header.batch_size, header.top_k, header.dtype)
        views = self._payloads.get(key)
        if views is None:
            offset = self._arena.request_offset(slot)
            views = PayloadViews.of(self._arena.buffer, offset, header)
            self._keep(self._payloads, key, views)
        return views

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


class Scratch:
    """The payload of a batch of several requests, put together in memory that is kept for the next one.

    Attributes:
        made: How many sets of views were made so far.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._views: dict[tuple[int, int, int], PayloadViews] = {}
        self.made = 0

    @property
    def nbytes(self) -> int:
        """Memory held: half as much again as the largest batch so far has needed."""
        return 0 if self._memory is None else len(self._memory)

    def gather(self, payloads: Sequence[PayloadViews], like: RequestHeader) -> PayloadViews:
        """Copies payloads one behind the other.

        Args:
            payloads: Of one H, K and dtype.
            like: The header of one of them.

        Returns:
            Views of all T tokens, valid until the next call.
        """
        tokens = sum([len(payload.arrays[0]) for payload in payloads])
        key = (tokens, like.top_k, like.dtype)
        joint = self._views.get(key)
        if joint is None:
            joint = self._make(like._replace(batch_size=tokens))
            if len(self._views) >= _KEPT:
                self._views.clear()
            self._views[key] = joint
        for place, array in enumerate(joint.arrays):
            np.concatenate([payload.arrays[place] for payload in payloads], out=array)
        return joint

    def _make(self, header: RequestHeader) -> PayloadViews:
        self.made += 1
        layout = payload_layout(
            header.batch_size, header.hidden_size, header.top_k, WireDtype(header.dtype)
        )
        needed = REQUEST_HEADER_BYTES + layout.total
        if self.nbytes < needed:
            # The old memory goes with the last view of it.
            self._views.clear()
            self._memory = None
            self._memory = mmap.mmap(-1, needed + needed // 2, flags=_PRIVATE)
        return PayloadViews.of(self._memory, 0, header)
