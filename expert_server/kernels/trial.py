"""Trial experts with random weights, and batches with known results.

T tokens, K top-k, H hidden, I intermediate, E experts; "rows" are the tokens of one expert.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from expert_server.kernels.kernel import ExpertKernel, KernelSpec, Quantization
from expert_server.kernels.quantize import fake_quantize
from expert_server.kernels.reference import ReferenceKernel
from expert_server.weights.weights import ExpertForm, ExpertWeights

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ROWS", "ExpertSizes", "Trial", "TrialBatch", "replica_bytes"]

# From decode to prefill.
ROWS = (1, 8, 64)
_MAX_EXPERTS = 2
# A prime, so that rows and columns differ although the numbers repeat.
_NUMBERS = 1_000_003


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of experts.

    Attributes:
        hidden, intermediate: H, I.
        num_experts: Logical experts of a layer.
        top_k: Experts of a token.
        has_bias: Whether both products have a bias.
    """

    hidden: int
    intermediate: int
    num_experts: int
    top_k: int
    has_bias: bool = False

    @classmethod
    def of(cls, experts: nn.Module, top_k: int) -> ExpertSizes:
        """The sizes of an experts module of transformers (the meta device suffices)."""
        shapes = {name: tensor.shape for name, tensor in experts.named_parameters()}
        num_experts, hidden, intermediate = shapes["down_proj"]
        if experts.is_transposed:
            hidden, intermediate = intermediate, hidden
        return cls(hidden, intermediate, num_experts, top_k, "down_proj_bias" in shapes)


@dataclass(frozen=True, eq=False)
class TrialBatch:
    """Tokens for the experts of layer 0, about equally many rows for each.

    Every column of the ids has some -1, as on a server that holds only some experts.
    """

    x_TH: torch.Tensor
    ids_TK: torch.Tensor
    scores_TK: torch.Tensor
    exact_TH: torch.Tensor  # float64

    def error(self, kernel: ExpertKernel) -> float:
        """||out - exact|| / ||exact|| of the kernel's result; NaN if that has a NaN."""
        out_TH = kernel(self.x_TH, self.ids_TK, self.scores_TK, 0)
        difference_TH = out_TH.double() - self.exact_TH
        return float(difference_TH.norm() / self.exact_TH.norm())


class Trial:
    """Input for trying kernels; created lazily, the same in every process.

    Args:
        form: How the experts compute.
        spec: The kernel's.
        sizes: The model's. Only a few experts are made, but in full size.
    """

    def __init__(self, form: ExpertForm, spec: KernelSpec, sizes: ExpertSizes) -> None:
        self._form, self._spec, self._sizes = form, spec, sizes
        self._rng = torch.Generator().manual_seed(0)

    @property
    def count(self) -> int:
        """Number of experts: 0 to count - 1 of layer 0."""
        return min(self._sizes.num_experts, _MAX_EXPERTS)

    @cached_property
    def experts(self) -> list[ExpertWeights]:
        """Weights that keep activations near 1."""
        hidden, intermediate = self._sizes.hidden, self._sizes.intermediate
        up = intermediate * (1 + self._form.has_gate)
        has_bias = self._sizes.has_bias
        return [
            ExpertWeights(
                self._matrix(up, hidden),
                self._matrix(hidden, intermediate),
                self._random(up) if has_bias else None,
                self._random(hidden) if has_bias else None,
            )
            for _ in range(self.count)
        ]

    @cached_property
    def batches(self) -> list[TrialBatch]:
        """One for each of ROWS."""
        width = 1 + min(self.count, self._sizes.top_k)
        tokens = [math.ceil(rows * (self.count + 1) / width) for rows in ROWS]
        x_TH = self._random(sum(tokens), self._sizes.hidden)
        # -1, 0, 1, ..., count - 1, -1, 0, ...: no expert comes twice in a token.
        ids_TK = torch.arange(sum(tokens) * width, dtype=torch.int32) % (self.count + 1) - 1
        ids_TK = ids_TK.view(-1, width)
        scores_TK = torch.rand(ids_TK.shape, generator=self._rng)
        exact_TH = torch.zeros(x_TH.shape, dtype=torch.float64)
        oracle = ReferenceKernel([self._form], KernelSpec(torch.float64))
        for expert, weights in enumerate(self.experts):
            # One at a time: a large expert takes much memory in float64.
            oracle.load(0, expert, self._kept(weights))
            exact_TH += oracle(x_TH, ids_TK.where(ids_TK == expert, -1), scores_TK, 0)
            oracle.unload(0, expert)
        whole = (x_TH, ids_TK, scores_TK, exact_TH)
        parts = zip(*(torch.split(tensor, tokens) for tensor in whole), strict=True)
        return [TrialBatch(*part) for part in parts]

    def _kept(self, weights: ExpertWeights) -> ExpertWeights:
        """The weights after quantisation, if any."""
        if self._spec.quantization is Quantization.NONE:
            return weights
        return fake_quantize(weights.to(torch.float32), self._form, self._spec.quantization)

    def _matrix(self, outputs: int, inputs: int) -> torch.Tensor:
        shape = (inputs, outputs) if self._form.is_transposed else (outputs, inputs)
        return self._random(*shape).div_(math.sqrt(inputs))

    def _random(self, *shape: int) -> torch.Tensor:
        """Random numbers of variance 1. A large tensor repeats them, since drawing all takes long."""
        numbers = torch.empty(min(_NUMBERS, math.prod(shape))).uniform_(
            -math.sqrt(3), math.sqrt(3), generator=self._rng
        )
        repeats = -(-math.prod(shape) // len(numbers))
        return numbers.to(self._spec.dtype).repeat(repeats)[: math.prod(shape)].view(shape)


def replica_bytes(
    kernel: ExpertKernel, form: ExpertForm, spec: KernelSpec, sizes: ExpertSizes
) -> int:
    """Memory that an empty kernel takes for one expert, measured by loading one."""
    (weights,) = Trial(form, spec, replace(sizes, num_experts=1)).experts
    kernel.load(0, 0, weights)
    taken = kernel.bytes
    kernel.unload(0, 0)
    return taken
