"""Random experts in transformers' layout and as quantised checkpoints store them, and random batches.

T tokens, K top-k, H hidden, I intermediate, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from eaas_cli.bench.experts.plan import FORMATS, Shape, compute_dtype
from expert_server.kernels.kernel import ExpertKernel, KernelSpec, Quantization
from expert_server.kernels.quantize import QUANTIZED
from expert_server.kernels.random_matrix import random_matrix
from expert_server.kernels.reference import ReferenceKernel
from expert_server.weights.weights import ExpertForm, ExpertWeights

__all__ = [
    "Batch",
    "Batches",
    "Source",
    "load_experts",
    "source_form",
    "spec_of",
]


@dataclass(frozen=True, eq=False)
class Batch:
    """The inputs of one layer call of the routed experts.

    Attributes:
        x_TH: Hidden states, in the products' dtype.
        ids_TK: Distinct experts of each token.
        scores_TK: float32; sum 1 per token.
    """

    x_TH: torch.Tensor
    ids_TK: torch.Tensor
    scores_TK: torch.Tensor

    @property
    def active(self) -> int:
        """Number of experts with at least one token, whose weights a call must read."""
        return len(torch.unique(self.ids_TK))

    def to(self, at: torch.device) -> Batch:
        """Return the batch in the memory of a device."""
        return Batch(self.x_TH.to(at), self.ids_TK.to(at), self.scores_TK.to(at))


class Batches:
    """Makes random batches for one shape. Batches of one seed begin with the same tokens at any size.

    Args:
        dtype: Dtype of the hidden states.
        most: Largest T that `get` takes.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype, most: int) -> None:
        self._shape, self._most = shape, most
        self._x_TH = torch.randn(most, shape.hidden, generator=_rng(0)).to(dtype)

    def get(self, tokens: int, seed: int) -> Batch:
        """Make a batch of T tokens whose experts are drawn from the seed."""
        rng = _rng(seed)
        order_TE = torch.rand(self._most, self._shape.num_experts, generator=rng)
        logits_TK = torch.randn(self._most, self._shape.top_k, generator=rng)
        return Batch(
            self._x_TH[:tokens],
            order_TE[:tokens].topk(self._shape.top_k).indices,
            logits_TK[:tokens].softmax(-1),
        )


class Source:
    """One layer's random experts, as a module of transformers (SwiGLU, no biases).

    Attributes:
        shape, dtype: As given.
    """

    def __init__(self, shape: Shape, dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype
        self._module = _module(shape)
        self.form = _form(self._module)
        rng = _rng(1)
        for name, parameter in list(self._module.named_parameters()):
            weights_ENK = torch.empty(parameter.shape, dtype=dtype)
            weights_ENK.normal_(0, 1 / math.sqrt(parameter.shape[2]), generator=rng)
            setattr(self._module, name, torch.nn.Parameter(weights_ENK, requires_grad=False))

    @property
    def up_ENH(self) -> torch.Tensor:
        """All experts' gate and up, N = 2I."""
        up: torch.Tensor = self._module.gate_up_proj
        return up

    @property
    def down_EHI(self) -> torch.Tensor:
        """All experts' down."""
        down: torch.Tensor = self._module.down_proj
        return down

    def move(self, at: torch.device) -> None:
        """Move the weights to the memory of a device."""
        self._module.to(at)

    def experts(self, dtype: str = "") -> Iterator[ExpertWeights]:
        """Yield each expert's weights: a view of the module's, or random ones as checkpoints store them."""
        return (self._expert(number, dtype) for number in range(self.shape.num_experts))

    def _expert(self, number: int, dtype: str) -> ExpertWeights:
        stored = spec_of(dtype, 1).stored
        if stored is None:
            return ExpertWeights(self.up_ENH[number], self.down_EHI[number])
        hidden, intermediate = self.shape.hidden, self.shape.intermediate
        rng = _rng(number)
        return ExpertWeights(
            random_matrix(stored, 2 * intermediate, hidden, rng),
            random_matrix(stored, hidden, intermediate, rng),
        )

    def exact(self, batch: Batch, dtype: str = "") -> torch.Tensor:
        """Compute the answer to a batch in float64, (T, H), to check the kernels of a dtype against.

        One expert at a time, to save memory.
        """
        oracle = ReferenceKernel([self.form], KernelSpec(torch.float64))
        exact_TH = torch.zeros(batch.x_TH.shape, dtype=torch.float64)
        for expert in torch.unique(batch.ids_TK).tolist():
            oracle.load(0, expert, self._expert(expert, dtype))
            mine_TK = batch.ids_TK.where(batch.ids_TK == expert, -1)
            exact_TH += oracle(batch.x_TH, mine_TK, batch.scores_TK, 0)
            oracle.unload(0, expert)
        return exact_TH

    @torch.inference_mode()
    def compute(self, implementation: str, batch: Batch) -> torch.Tensor:
        """Compute a batch with one of transformers' implementations; return (T, H) in the weights' dtype.

        Args:
            implementation: eager, grouped_mm or batched_mm.
            batch: The batch; scores are rounded to the weights' dtype, as transformers' routers do.
        """
        self._module.config._experts_implementation = implementation
        scores_TK = batch.scores_TK.to(batch.x_TH.dtype)
        answer: torch.Tensor = self._module(batch.x_TH, batch.ids_TK, scores_TK)
        return answer


def source_form(shape: Shape) -> ExpertForm:
    """Describe the form of a source's experts (activation, biases); builds no weights."""
    return _form(_module(shape))


def _form(module: Any) -> ExpertForm:
    return ExpertForm(has_gate=True, is_transposed=False, activate=module._apply_gate)


def _module(shape: Shape) -> Any:
    """Build transformers' experts module on the meta device, without memory for its weights."""
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

    config = Qwen3MoeConfig(
        num_experts=shape.num_experts,
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.intermediate,
        hidden_act="silu",
    )
    with torch.device("meta"):
        return Qwen3MoeExperts(config)


def _rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def spec_of(dtype: str, threads: int) -> KernelSpec:
    """Return what a kernel of a dtype of the stored weights computes with."""
    compute = getattr(torch, compute_dtype(dtype))
    if dtype in QUANTIZED:
        return KernelSpec(compute, Quantization(dtype), threads)
    return KernelSpec(compute, threads=threads, stored=FORMATS.get(dtype))


def load_experts(kernel: ExpertKernel, source: Source, dtype: str) -> None:
    """Load a source's experts into layer 0 of a kernel."""
    for number, weights in enumerate(source.experts(dtype)):
        kernel.load(0, number, weights)
