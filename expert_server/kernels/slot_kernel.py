"""A kernel that reads requests from the loop's slots, and writes the results there, itself.

Letters: T tokens, H hidden size, K experts per token (top-k).
"""

from __future__ import annotations

import abc
import mmap
from collections.abc import Sequence

import torch

from expert_server.kernels.kernel import ExpertKernel
from expert_server.kernels.trial import ExpertSizes

__all__ = ["Rows", "SlotKernel"]

Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""A request: hidden states (T, H), expert ids (T, K), scores (T, K)."""


class SlotKernel(ExpertKernel):
    """A kernel with memory of its own, a GPU's: the host need not join requests or copy results."""

    @abc.abstractmethod
    def pin_slots(self, memory: mmap.mmap) -> None:
        """Prepare the arena's memory for copies to and from the device, until `close`; once.

        Where that fails, a line in the log says so, and rows are copied once more.
        """

    @abc.abstractmethod
    def compute_slots(
        self, requests: Sequence[Rows], results: Sequence[torch.Tensor], layer: int
    ) -> None:
        """Compute requests in the arena as one batch, each into its result (T, H), float32, in the arena.

        They are there when this returns. Nothing of the slots is used afterwards, even after an error.

        Args:
            requests: Of one dtype, H and K.
            results: Where the result of each goes.
            layer: MoE layer; the model has it.

        Raises:
            LookupError: An expert is not held; names the layer and the expert. No result is written.
            DeviceLostError: The device has failed.
        """

    @abc.abstractmethod
    def memory_limit(self, wanted: int, tokens: int, sizes: ExpertSizes, replica: int) -> int:
        """Return the bytes of the device's memory that experts may take; 0: no limit.

        Args:
            wanted: `expert_server.memory_bytes`; 0: all free memory, except what the largest batch needs.
            tokens: Of the largest batch.
            sizes: Sizes of the experts.
            replica: Bytes of a replica (`replica_bytes`).

        Raises:
            ConfigError: There is less than is wanted, or than a batch takes.
        """
