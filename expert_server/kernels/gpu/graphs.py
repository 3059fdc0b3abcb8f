"""Batches of few tokens as CUDA graphs: one launch for all of a batch, instead of a dozen from Python.

A graph is captured once for each size, a power of two of tokens, and then replayed. It knows addresses, not
contents. So each has memory for its inputs, among them the layer's table of experts, which is copied there
for every batch: all layers of a shape share the graph, and it stays right whatever is loaded or unloaded.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

import torch

from eaas.log import get_logger
from expert_server.kernels.gpu.batches import BatchMemory
from expert_server.kernels.gpu.device import Device
from expert_server.kernels.gpu.launches import Program, launch

__all__ = ["Graphs"]

_log = get_logger(__name__)

Issue = Callable[[torch.Tensor], None]
"""Issues a batch that is in its memory, on the experts at these addresses (E)."""

# Not measured: padding larger batches to a power of two may cost more than launching them one by one.
_MOST_TOKENS = 256
# Tables have a multiple of so many places, so that few graphs differ in that only.
_PLACES = 64
# Each takes memory, and clients choose what is in its key.
_MOST_GRAPHS = 64


class Graphs:
    """The graphs of a device, for the thread that computes."""

    def __init__(self, device: Device) -> None:
        self._device = device
        # By (T, K, H), dtype of the hidden states, places of the table, and program. None: the device has no
        # memory for it.
        self._graphs: dict[Hashable, tuple[BatchMemory, Issue] | None] = {}
        self._is_on = device.can_capture

    def tokens(self, tokens: int) -> int:
        """Return the tokens of the graph for a batch of so many: as many if it has none."""
        if not self._is_on or not 0 < tokens <= _MOST_TOKENS:
            return tokens
        return 1 << (tokens - 1).bit_length()

    def prepare(
        self,
        program: Program,
        shape: tuple[int, int, int],
        dtype: torch.dtype,
        addresses: torch.Tensor,
    ) -> tuple[BatchMemory, Callable[[], None]]:
        """Return memory for a batch, and what issues it; within `Device.batch`.

        The first batch of a size is captured. A batch is launched without a graph if it is large, there are
        too many graphs, the device has no memory for this one, or it cannot capture. Then a line is in the
        log, and there are no graphs from now on.

        Args:
            program: What device code is compiled for.
            shape: (T, K, H); T as `tokens` says. Tokens that are not there must have no expert.
            dtype: Of the hidden states.
            addresses: (E) addresses of the experts' blocks, on the device.
        """
        places = -(-len(addresses) // _PLACES) * _PLACES
        key = shape, dtype, places, program
        is_small = self._is_on and shape[0] <= _MOST_TOKENS
        if is_small and key not in self._graphs and len(self._graphs) < _MOST_GRAPHS:
            try:
                self._graphs[key] = self._capture(*key)
            except torch.OutOfMemoryError as error:
                self._graphs[key] = None
                _log.warning("batches of %d tokens have no CUDA graph: %s", shape[0], error)
            except RuntimeError as error:
                self._is_on = False
                _log.warning("batches are launched without CUDA graphs: %s", error)
        graph = self._graphs.get(key) if self._is_on else None
        if graph is not None:
            memory, issue = graph
            return memory, partial(issue, addresses)
        memory = BatchMemory.allocate(self._device, shape, dtype)
        return memory, partial(launch, program, memory, addresses)

    def close(self) -> None:
        """Drop all graphs, and their memory."""
        self._graphs.clear()

    def _capture(
        self, shape: tuple[int, int, int], dtype: torch.dtype, places: int, program: Program
    ) -> tuple[BatchMemory, Issue]:
        memory = BatchMemory.allocate(self._device, shape, dtype)
        table = self._device.empty(places, dtype=torch.int64)
        # So that nothing is computed before there is a batch.
        memory.routes.fill_(-1)
        replay = self._device.capture(partial(launch, program, memory, table))

        def issue(addresses: torch.Tensor) -> None:
            table[: len(addresses)].copy_(addresses, non_blocking=True)
            replay()

        return memory, issue
