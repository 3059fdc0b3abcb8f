"""Random experts and batches of the kernels' tests, and the error of a kernel's result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional

from expert_forms import ClampedSwiglu, swiglu
from expert_server.kernels import ExpertKernel, StoredFormat
from expert_server.kernels.random_matrix import random_matrix
from expert_server.weights.weights import ExpertForm, ExpertWeights

__all__ = [
    "BOUND",
    "FORMS",
    "batch",
    "check_unloading",
    "expert",
    "relative_error",
    "stored_expert",
]

BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def geglu_tanh(product: torch.Tensor) -> torch.Tensor:
    gate, up = product.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def relu_squared(product: torch.Tensor) -> torch.Tensor:
    return functional.relu(product).square()


FORMS = {
    "swiglu": ExpertForm(True, False, swiglu),
    "clamped": ExpertForm(True, True, ClampedSwiglu().apply),
    "geglu_tanh": ExpertForm(True, False, geglu_tanh),
    "gelu": ExpertForm(False, False, functional.gelu),
    "relu": ExpertForm(False, True, functional.relu),
    "relu_squared": ExpertForm(False, False, relu_squared),
}


def expert(
    form: ExpertForm, hidden: int, intermediate: int, dtype: torch.dtype, rng: torch.Generator
) -> ExpertWeights:
    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    width = 2 * intermediate if form.has_gate else intermediate
    up, down = normal(width, hidden) / hidden**0.5, normal(hidden, intermediate) / intermediate**0.5
    if form.is_transposed:
        up, down = up.t().contiguous(), down.t().contiguous()
    biases = (normal(width), normal(hidden)) if form.is_transposed else (None, None)
    return ExpertWeights(up, down, *biases).to(dtype)


def stored_expert(
    stored: StoredFormat, form: ExpertForm, hidden: int, intermediate: int, rng: torch.Generator
) -> ExpertWeights:
    width = intermediate * (1 + form.has_gate)
    up_bias, down_bias = (
        torch.randn(size, generator=rng) if form.is_transposed else None for size in (width, hidden)
    )
    return ExpertWeights(
        random_matrix(stored, width, hidden, rng),
        random_matrix(stored, hidden, intermediate, rng),
        up_bias,
        down_bias,
    )


def batch(
    tokens: int, hidden: int, ids: Any, top_k: int, dtype: torch.dtype, seed: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x_TH, ids_TK, scores_TK; a tenth of the scores is 0."""
    rng = torch.Generator().manual_seed(seed)
    scores_TK = torch.rand(tokens, top_k, generator=rng)
    return (
        torch.randn(tokens, hidden, generator=rng).to(dtype),
        torch.tensor(ids, dtype=torch.int32).view(tokens, top_k),
        scores_TK.where(scores_TK > 0.1, 0.0),
    )


def relative_error(
    kernel: ExpertKernel,
    reference: ExpertKernel,
    x_TH: torch.Tensor,
    ids_TK: torch.Tensor,
    scores_TK: torch.Tensor,
) -> float:
    """Relative, of the whole batch.

    Of few and small numbers the sum may be almost nothing: rounding is then judged against a
    tenth of what it is usually, with weights and hidden states of unit variance.
    """
    out_TH = kernel(x_TH, ids_TK, scores_TK, 0)
    right_TH = reference(x_TH, ids_TK, scores_TK, 0)
    assert out_TH.dtype == torch.float32
    assert out_TH.shape == right_TH.shape
    usual = scores_TK.where(ids_TK >= 0, 0.0).norm().item() * x_TH.shape[1] ** 0.5
    norm = max(right_TH.norm().item(), 0.1 * usual)
    return (out_TH - right_TH).norm().item() / norm if norm else out_TH.abs().sum().item()


def check_unloading(
    kernel: ExpertKernel, weights: Sequence[ExpertWeights], dtype: torch.dtype
) -> None:
    """Unload and load experts of layer 0, of which the kernel holds three with hidden size 48."""
    one = batch(2, 48, [0, 1, 2, 1], 2, dtype, 0)
    before_TH = kernel(*one, 0).clone()
    held = kernel.bytes
    kernel.unload(0, 1)
    assert kernel.bytes == held * 2 // 3
    with pytest.raises(LookupError, match="expert 1 is not held"):
        kernel(*one, 0)
    kernel.load(0, 1, weights[1])
    assert (kernel.count, kernel.bytes) == (3, held)
    assert torch.equal(kernel(*one, 0), before_TH)
    for number in range(3):
        kernel.unload(0, number)
    with pytest.raises(LookupError, match="expert 0 is not held"):
        kernel(*one, 0)
    none = torch.full((2, 2), -1, dtype=torch.int32)
    assert torch.equal(kernel(one[0], none, one[2], 0), torch.zeros(2, 48))
