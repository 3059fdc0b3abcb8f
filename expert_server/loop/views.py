"""Tensor views of requests in an expert server's slots, and scratch memory that joins them to a batch.

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
from eaas.wire.slot import request_views
from eaas.wire.views import SlotViews

__all__ = ["PayloadViews", "Scratch", "TensorViews"]

PayloadArrays = tuple[npt.NDArray[Any], npt.NDArray[np.int32], npt.NDArray[np.float32]]
"""Views of a payload: hidden states (T, H), bfloat16 as uint16; expert ids (T, K); scores (T, K)."""

_PRIVATE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
# Batch shapes whose views are kept. Beyond this number, all are dropped and made anew.
_KEPT = 2048


@dataclass(frozen=True, eq=False, slots=True)
class PayloadViews:
    """Views of a payload's three sections, without a copy: `hidden` (T, H), ids and scores (T, K).

    Attributes:
        arrays: NumPy arrays, for copying; bfloat16 shows as uint16.
        tensors: The same memory as tensors, for computing.
    """

    arrays: PayloadArrays
    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]

    @classmethod
    def of(cls, arrays: PayloadArrays, dtype: WireDtype) -> PayloadViews:
        """Make the views of a payload; the kernel reads the tensors, which share the arrays' memory."""
        x_TH, ids_TK, scores_TK = map(torch.from_numpy, arrays)
        if dtype is WireDtype.BFLOAT16:
            x_TH = x_TH.view(torch.bfloat16)
        return cls(arrays, (x_TH, ids_TK, scores_TK))


class TensorViews(SlotViews):
    """Views of an arena's slots, with tensors of the same memory: the kernel reads requests in place."""

    def __init__(self, arena: Arena, hidden_size: int) -> None:
        super().__init__(arena, hidden_size)
        self._with_tensors: dict[tuple[int, int, int, int], PayloadViews] = {}
        self._result_tensors: dict[tuple[int, int], torch.Tensor] = {}

    def tensors(self, slot: int, header: RequestHeader) -> PayloadViews:
        """Return the views of an accepted request in a slot; they are kept for reuse."""
        key = (slot, header.batch_size, header.top_k, header.dtype)
        views = self._with_tensors.get(key)
        if views is None:
            arrays = request_views(self._arena.buffer, self._arena.request_offset(slot), header)
            views = PayloadViews.of(arrays, WireDtype(header.dtype))
            self._keep(self._with_tensors, key, views)
        return views

    def result_tensor(self, slot: int, rows: int) -> torch.Tensor:
        """Return the view of `result` as a tensor (T, H), for a kernel that fills it; kept for reuse."""
        key = (slot, rows)
        tensor = self._result_tensors.get(key)
        if tensor is None:
            tensor = torch.from_numpy(self.result(slot, rows))
            self._keep(self._result_tensors, key, tensor)
        return tensor

    def clear(self) -> None:
        """Drop all views when the loop ends, so that the arena's memory can be freed."""
        super().clear()
        self._with_tensors.clear()
        self._result_tensors.clear()


class Scratch:
    """Concatenates the payloads of a batch, in memory that is reused for the next batch.

    Attributes:
        made: Number of view sets made so far.
    """

    def __init__(self) -> None:
        self._memory: mmap.mmap | None = None
        self._views: dict[tuple[int, int, int], PayloadViews] = {}
        self.made = 0

    @property
    def nbytes(self) -> int:
        """Memory held in bytes: one and a half times what the largest batch needed."""
        return 0 if self._memory is None else len(self._memory)

    def gather(self, payloads: Sequence[PayloadViews], like: RequestHeader) -> PayloadViews:
        """Concatenate the payloads of several requests into one batch, the kernel's input.

        Args:
            payloads: Payloads of one H, K and dtype.
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
            # The old memory is freed with its last view.
            self._views.clear()
            self._memory = None
            self._memory = mmap.mmap(-1, needed + needed // 2, flags=_PRIVATE)
        assert self._memory is not None
        arrays = request_views(self._memory, 0, header)
        return PayloadViews.of(arrays, WireDtype(header.dtype))
