"""Tries a kernel on random experts, as an expert server starts: is it right, and how large is an expert?

T tokens, K top-k, H hidden, I intermediate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from eaas.checkpoint.quantized import QuantizedMatrix
from expert_server.kernels.kernel import ExpertKernel, KernelSpec, Quantization
from expert_server.kernels.quantize import fake_quantize
from expert_server.kernels.random_matrix import random_matrix
from expert_server.kernels.reference import ReferenceKernel
from expert_server.weights.weights import ExpertForm, ExpertWeights

if TYPE_CHECKING:
    from torch import nn

__all__ = ["ExpertSizes", "replica_bytes", "trial_error"]

# Trial experts, and the tokens of each: from decode to prefill.
_EXPERTS = 2
_ROWS = (1, 8, 64)
# A prime, so that rows and columns differ although the numbers repeat.
_NUMBERS = 1_000_003


@dataclass(frozen=True)
class ExpertSizes:
    """Sizes of a model's experts.

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
        """Read the sizes off an experts module of transformers (the meta device suffices)."""
        shapes = {name: tensor.shape for name, tensor in experts.named_parameters()}
        num_experts, hidden, intermediate = shapes["down_proj"]
        if experts.is_transposed:
            hidden, intermediate = intermediate, hidden
        return cls(hidden, intermediate, num_experts, top_k, "down_proj_bias" in shapes)


def trial_error(
    kernel: ExpertKernel, form: ExpertForm, spec: KernelSpec, sizes: ExpertSizes
) -> float:
    """Measure a kernel's largest relative error, ||out - exact|| / ||exact||, on trial experts of layer 0.

    The kernel must be empty. `exact` is the reference in float64, with the weights after quantisation, or as
    the checkpoint stores them. The error is NaN if a result has a NaN.
    """
    random = _Random(spec)
    count = min(_EXPERTS, sizes.num_experts)
    width = 1 + min(count, sizes.top_k)
    tokens = [math.ceil(rows * (count + 1) / width) for rows in _ROWS]
    # -1, 0, 1, -1, 0, ...: no expert comes twice in a token, and every column has some -1, as on a server
    # that holds only some experts.
    ids_TK = torch.arange(sum(tokens) * width, dtype=torch.int32) % (count + 1) - 1
    ids_TK = ids_TK.view(-1, width)
    x_TH = random.tensor(len(ids_TK), sizes.hidden)
    scores_TK = torch.rand(ids_TK.shape, generator=random.rng)
    exact_TH = torch.zeros(x_TH.shape, dtype=torch.float64)
    oracle = ReferenceKernel([form], KernelSpec(torch.float64))
    for expert in range(count):
        weights = random.expert(form, sizes)
        kernel.load(0, expert, weights)
        if spec.quantization is not Quantization.NONE:
            weights = fake_quantize(weights.to(torch.float32), form, spec.quantization)
        # One at a time: a large expert takes much memory in float64.
        oracle.load(0, expert, weights)
        exact_TH += oracle(x_TH, ids_TK.where(ids_TK == expert, -1), scores_TK, 0)
        oracle.unload(0, expert)
    errors = []
    parts = (torch.split(tensor, tokens) for tensor in (x_TH, ids_TK, scores_TK, exact_TH))
    for x, ids, scores, exact in zip(*parts, strict=True):
        errors.append((kernel(x, ids, scores, 0).double() - exact).norm() / exact.norm())
    for expert in range(count):
        kernel.unload(0, expert)
    return float(torch.stack(errors).max())


def replica_bytes(
    kernel: ExpertKernel, form: ExpertForm, spec: KernelSpec, sizes: ExpertSizes
) -> int:
    """Measure an expert's bytes in an empty kernel, by loading a random one.

    A server with a memory limit registers with it, so that the balancer places no more than fits.
    """
    kernel.load(0, 0, _Random(spec).expert(form, sizes))
    taken = kernel.bytes
    kernel.unload(0, 0)
    return taken


class _Random:
    """Random tensors and experts of variance 1, the same in every process."""

    def __init__(self, spec: KernelSpec) -> None:
        self._dtype, self._stored = spec.dtype, spec.stored
        self.rng = torch.Generator().manual_seed(0)

    def tensor(self, *shape: int) -> torch.Tensor:
        """Draw a random tensor. A large one repeats its numbers, because drawing all takes long."""
        numbers = torch.empty(min(_NUMBERS, math.prod(shape))).uniform_(
            -math.sqrt(3), math.sqrt(3), generator=self.rng
        )
        repeats = -(-math.prod(shape) // len(numbers))
        return numbers.to(self._dtype).repeat(repeats)[: math.prod(shape)].view(shape)

    def expert(self, form: ExpertForm, sizes: ExpertSizes) -> ExpertWeights:
        """Draw an expert's weights, scaled to keep activations near 1."""
        hidden, intermediate = sizes.hidden, sizes.intermediate
        up = intermediate * (1 + form.has_gate)
        up_bias, down_bias = (
            self.tensor(width) if sizes.has_bias else None for width in (up, hidden)
        )
        return ExpertWeights(
            self._matrix(up, hidden, form),
            self._matrix(hidden, intermediate, form),
            up_bias,
            down_bias,
        )

    def _matrix(
        self, outputs: int, inputs: int, form: ExpertForm
    ) -> torch.Tensor | QuantizedMatrix:
        if self._stored is not None:
            return random_matrix(self._stored, outputs, inputs, self.rng)
        shape = (inputs, outputs) if form.is_transposed else (outputs, inputs)
        return self.tensor(*shape).div_(math.sqrt(inputs))
