"""Brings the requests of a batch to a device, and the results back, with one wait.

Hidden states go from the slots to the device, and results from the device into the slots, if the slots'
memory is page-locked; else both pass through page-locked memory. Ids and scores always do: the host checks
the ids, and the device must see what was checked, whatever a client writes meanwhile.

T tokens of the batch, H hidden size, K experts per token.
"""

from __future__ import annotations

import mmap
import resource
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from eaas.log import get_logger
from expert_server.kernels.gpu.device import Device
from expert_server.kernels.slot_kernel import Rows

__all__ = ["BatchMemory", "Batches"]

_log = get_logger(__name__)


@dataclass(frozen=True, eq=False)
class BatchMemory:
    """Memory of the device for a batch of up to T tokens.

    Attributes:
        x_TH: Hidden states.
        ids_TK: Experts, int32; -1: none.
        scores_TK: Scores, float32.
        out_TH: Results, float32.
        routes: Ids and scores, which are one copy: int32, with room up to a multiple of 16 bytes after each.
    """

    x_TH: torch.Tensor
    ids_TK: torch.Tensor
    scores_TK: torch.Tensor
    out_TH: torch.Tensor
    routes: torch.Tensor

    @classmethod
    def allocate(
        cls, device: Device, shape: tuple[int, int, int], dtype: torch.dtype
    ) -> BatchMemory:
        """Allocate it for (T, K, H) and hidden states of a dtype, for the current stream."""
        tokens, top_k, hidden = shape
        x_TH = device.empty(tokens, hidden, dtype=dtype)
        routes = device.empty(*_routes_shape(tokens, top_k), dtype=torch.int32)
        out_TH = device.empty(tokens, hidden, dtype=torch.float32)
        return cls(x_TH, *_divide(routes, tokens, top_k), out_TH, routes)


class Batches:
    """Copies to and from a device, of the thread that computes.

    Attributes:
        is_pinned: Whether the slots' memory is page-locked.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._slots: torch.Tensor | None = None
        self.is_pinned = False
        self._joined = torch.empty(0, dtype=torch.int32)
        self._routes, self._hidden, self._results = (_Staging(device) for _ in range(3))

    def pin(self, memory: mmap.mmap) -> None:
        """Page-lock the slots' memory until `close`; on failure log a line, and copy rows once more."""
        # The view keeps the memory mapped.
        self._slots = torch.frombuffer(memory, dtype=torch.uint8)
        try:
            self._device.pin(self._slots)
            self.is_pinned = True
        except OSError as error:
            limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
            _log.warning(
                "the slots' %d MB cannot be page-locked (%s; ulimit -l: %s): rows are copied once more",
                len(memory) >> 20,
                error,
                "unlimited" if limit == resource.RLIM_INFINITY else f"{limit >> 10} kB",
            )

    def close(self) -> None:
        """End the page lock. Idempotent."""
        slots = self._slots if self.is_pinned else None
        self._slots, self.is_pinned = None, False
        if slots is not None:
            self._device.unpin(slots)

    def join_routes(self, requests: Sequence[Rows], tokens: int) -> npt.NDArray[np.int32]:
        """Copy the ids and scores of a batch for `run`; return the ids (tokens * K), to be checked.

        All ids must fit int32. `tokens`: T or more; the others are padding and have no expert.
        """
        top_k, count = requests[0][1].shape[1], sum(len(ids_TK) for _, ids_TK, _ in requests)
        self._joined = self._routes.take(_routes_shape(tokens, top_k), torch.int32)
        ids_TK, scores_TK = _divide(self._joined, tokens, top_k)
        torch.cat([ids_TK for _, ids_TK, _ in requests], out=ids_TK[:count])
        torch.cat([scores_TK for *_, scores_TK in requests], out=scores_TK[:count])
        ids_TK[count:] = -1
        return ids_TK.numpy().reshape(-1)

    def run(
        self,
        requests: Sequence[Rows],
        results: Sequence[torch.Tensor],
        prepare: Callable[[], tuple[BatchMemory, Callable[[], None]]],
        are_pinned: bool,
    ) -> None:
        """Compute the batch of the last `join_routes`, and wait once.

        Args:
            requests: The same requests.
            results: Where the result (T, H) of each request goes, float32.
            prepare: Returns memory for the batch, and what issues the batch in it; called within
                `Device.batch`.
            are_pinned: Whether hidden states and results lie in memory that `pin` has locked.
        """
        rows, device = [x_TH for x_TH, _, _ in requests], self._device
        sizes = [len(x_TH) for x_TH in rows]
        with device.batch():
            memory, issue = prepare()
            x_TH, out_TH = memory.x_TH[: sum(sizes)], memory.out_TH[: sum(sizes)]
            sent, received = rows, results
            if not are_pinned:
                sent = [torch.cat(rows, out=self._hidden.take(x_TH.shape, x_TH.dtype))]
                received = [self._results.take(out_TH.shape, out_TH.dtype)]
            for to, part in zip(torch.split(x_TH, [*map(len, sent)]), sent, strict=True):
                device.copy(to, part)
            device.copy(memory.routes, self._joined)
            issue()
            for to, part in zip(received, torch.split(out_TH, [*map(len, received)]), strict=True):
                device.copy(to, part)
        if not are_pinned:
            for to, part in zip(results, torch.split(received[0], sizes), strict=True):
                to.copy_(part)


def _routes_shape(tokens: int, top_k: int) -> tuple[int, int]:
    # Device code is compiled for addresses that are multiples of 16 bytes.
    return 2, -(-(tokens * top_k) // 4) * 4


def _divide(routes: torch.Tensor, tokens: int, top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ids (T, K) and the scores (T, K) in joined routes."""
    ids, scores = routes[:, : tokens * top_k].unbind()
    return ids.view(tokens, top_k), scores.view(torch.float32).view(tokens, top_k)


class _Staging:
    """Page-locked memory that is reused for the next batch; grows to one and a half times the largest."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return memory as a tensor, with anything in it, valid until the next call."""
        nbytes = int(np.prod(shape)) * dtype.itemsize
        if len(self._memory) < nbytes:
            self._memory = self._device.pinned(nbytes + nbytes // 2)
        return self._memory[:nbytes].view(dtype).view(shape)
