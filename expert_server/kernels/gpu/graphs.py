"""Batches of few tokens as CUDA graphs: one launch for all of a batch, instead of a dozen from Python.

A graph is captured once for each size, a power of two of tokens, and then replayed. It knows addresses, not
contents. So each has memory for its inputs, among them the layer's table of experts, which is copied there
for every batch: all layers of a shape share the graph, and it stays right whatever is loaded or unloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from eaas.log import get_logger
from expert_server.kernels.gpu.batches import BatchMemory
from expert_server.kernels.gpu.device import Device

__all__ = ["Graph", "GraphKey", "Graphs"]

_log = get_logger(__name__)

Issue = Callable[[BatchMemory, torch.Tensor], None]
"""Issues the batch in its memory, on the experts at these addresses (E)."""

# Not measured: padding larger batches to a power of two may cost more than launching them one by one.
_MOST_TOKENS = 256
# Tables have a multiple of so many places, so that few graphs differ in that only.
_PLACES = 64
# Each takes memory, and clients choose what is in its key.
_MOST_GRAPHS = 64


@dataclass(frozen=True)
class GraphKey:
    """What a graph depends on.

    Attributes:
        tokens: T, a power of two.
        top_k: K.
        hidden: H.
        dtype: Of the hidden states.
        experts: Places of the table.
        kind: All else that device code is compiled for, hashable.
    """

    tokens: int
    top_k: int
    hidden: int
    dtype: torch.dtype
    experts: int
    kind: object


@dataclass(frozen=True, eq=False)
class Graph:
    """What a graph reads and writes, and what starts it.

    Attributes:
        memory: Of a batch; tokens that are not there must have no expert.
        table: (E) addresses of the experts' blocks, for `issue` to fill.
        replay: Issues the batch.
    """

    memory: BatchMemory
    table: torch.Tensor
    replay: Callable[[], None]

    def issue(self, addresses: torch.Tensor) -> None:
        """Issue the batch that is in `memory`, on the experts at these addresses."""
        self.table[: len(addresses)].copy_(addresses, non_blocking=True)
        self.replay()


class Graphs:
    """The graphs of a device, for the thread that computes.

    Args:
        device: The device.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        # None: the device has no memory for it.
        self._graphs: dict[GraphKey, Graph | None] = {}
        self._is_on = device.can_capture

    def tokens(self, tokens: int) -> int:
        """Return the tokens of the graph for a batch of so many: as many if it has none."""
        if not self._is_on or not 0 < tokens <= _MOST_TOKENS:
            return tokens
        return 1 << (tokens - 1).bit_length()

    def places(self, experts: int) -> int:
        """Return the places of a graph's table for so many experts."""
        return -(-experts // _PLACES) * _PLACES

    def get(self, key: GraphKey, issue: Issue) -> Graph | None:
        """Return a graph, within `Device.batch`; capture it if it is the first of its key.

        Args:
            key: What it depends on.
            issue: Issues a batch.

        Returns:
            None: The batch is large, there are too many graphs, the device has no memory for this one, or it
            cannot capture. Then a line is in the log, and there are no graphs from now on.
        """
        if not self._is_on or key.tokens > _MOST_TOKENS:
            return None
        if key not in self._graphs and len(self._graphs) < _MOST_GRAPHS:
            try:
                self._graphs[key] = self._capture(key, issue)
            except torch.OutOfMemoryError as error:
                self._graphs[key] = None
                _log.warning("batches of %d tokens have no CUDA graph: %s", key.tokens, error)
            except RuntimeError as error:
                self._is_on = False
                _log.warning("batches are launched without CUDA graphs: %s", error)
        return self._graphs.get(key)

    def close(self) -> None:
        """Drop all graphs, and their memory."""
        self._graphs.clear()

    def _capture(self, key: GraphKey, issue: Issue) -> Graph:
        memory = BatchMemory.allocate(self._device, key.tokens, key.top_k, key.hidden, key.dtype)
        table = self._device.empty(key.experts, dtype=torch.int64)
        # So that nothing is computed before there is a batch.
        memory.routes.fill_(-1)
        return Graph(memory, table, self._device.capture(lambda: issue(memory, table)))
