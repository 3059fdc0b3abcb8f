"""The computation of one layer's experts; every kernel answers to the same protocol."""

from typing import Protocol

import torch

from expert_server.kernels.reference import ReferenceKernel

__all__ = ["Kernel", "ReferenceKernel"]


class Kernel(Protocol):
    """Computes the part of an MoE layer that the experts held here contribute."""

    def __call__(
        self,
        x_TH: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        scores_TK: torch.Tensor,
        layer: int,
    ) -> torch.Tensor:
        """Weighted sum of the named experts' outputs, float32 (T, H).

        Args:
            x_TH: Hidden states, any float dtype; T may be 0.
            expert_ids_TK: Logical experts, any integer dtype; -1 means "none here".
            scores_TK: Router scores, float32.
            layer: MoE layer.

        Raises:
            LookupError: An expert is not held; names the layer and the expert.
        """
        ...
