"""The experts' forward and backward for training on a CPU: one matrix product per expert.

transformers' own ways are made for serving (`eager`: a mask and an index_add per expert) or for
GPUs (`grouped_mm`). Here the tokens are sorted by expert once; every expert then takes a contiguous
piece, and its gradients need no scatter. Held equal to `eager` by a test.

Pieces are padded to whole blocks: oneDNN compiles a kernel for each new shape, which takes 20 times
as long as the product itself, and keeps the last thousand of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

__all__ = ["NAME", "register"]

NAME = "sorted_by_expert"
_BLOCK = 64


class _SortedExperts(torch.autograd.Function):
    """SwiGLU experts over N = T x K pairs of a token and an expert, sorted and padded to P rows.

    Rows that pad repeat token 0 with weight 0: they add nothing to a result or to a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TH: torch.Tensor,
        ids_TK: torch.Tensor,
        weights_TK: torch.Tensor,
        gate_up_EFH: torch.Tensor,
        down_EHI: torch.Tensor,
    ) -> torch.Tensor:
        top_k = ids_TK.shape[1]
        ids_N, order_N = ids_TK.flatten().sort(stable=True)
        rows_N, pieces, padded = _layout(ids_N, len(down_EHI))
        token_P = order_N.new_zeros(padded)
        token_P[rows_N] = order_N // top_k
        weights_P1 = weights_TK.new_zeros(padded, 1)
        weights_P1[rows_N, 0] = weights_TK.flatten()[order_N]
        row_N = torch.empty_like(order_N)
        row_N[order_N] = rows_N

        x_PH = x_TH.index_select(0, token_P)
        gate_up_PF = x_PH.new_empty(padded, gate_up_EFH.shape[1])
        for expert, piece in pieces:
            torch.mm(x_PH[piece], gate_up_EFH[expert].t(), out=gate_up_PF[piece])
        gate_PI, up_PI = gate_up_PF.chunk(2, dim=-1)
        # The weight goes in before `down`, which is linear: fewer columns to multiply.
        inner_PI = functional.silu(gate_PI).mul_(up_PI).mul_(weights_P1)
        y_PH = torch.empty_like(x_PH)
        for expert, piece in pieces:
            torch.mm(inner_PI[piece], down_EHI[expert].t(), out=y_PH[piece])
        ctx.save_for_backward(
            x_PH, gate_up_PF, inner_PI, weights_P1, token_P, row_N, gate_up_EFH, down_EHI
        )
        ctx.pieces = pieces
        return _sum_of_experts(y_PH, row_N, top_k)

    @staticmethod
    def backward(ctx: Any, grad_TH: torch.Tensor) -> Any:  # type: ignore[override]
        x_PH, gate_up_PF, inner_PI, weights_P1, token_P, row_N, gate_up_EFH, down_EHI = (
            ctx.saved_tensors
        )
        grad_PH = grad_TH.index_select(0, token_P)
        grad_inner_PI = torch.empty_like(inner_PI)
        grad_down_EHI = torch.zeros_like(down_EHI)
        for expert, piece in ctx.pieces:
            torch.mm(grad_PH[piece], down_EHI[expert], out=grad_inner_PI[piece])
            torch.mm(grad_PH[piece].t(), inner_PI[piece], out=grad_down_EHI[expert])

        gate_PI, up_PI = gate_up_PF.chunk(2, dim=-1)
        silu_PI = functional.silu(gate_PI)
        grad_weights_P = (grad_inner_PI * silu_PI).mul_(up_PI).sum(-1)
        grad_inner_PI.mul_(weights_P1)
        grad_gate_up_PF = torch.empty_like(gate_up_PF)
        grad_gate_PI, grad_up_PI = grad_gate_up_PF.chunk(2, dim=-1)
        torch.mul(grad_inner_PI, silu_PI, out=grad_up_PI)
        grad_gate_PI.copy_(
            torch.ops.aten.silu_backward(grad_inner_PI.mul_(up_PI), gate_PI.contiguous())
        )

        grad_x_PH = torch.empty_like(x_PH)
        grad_gate_up_EFH = torch.zeros_like(gate_up_EFH)
        for expert, piece in ctx.pieces:
            torch.mm(grad_gate_up_PF[piece], gate_up_EFH[expert], out=grad_x_PH[piece])
            torch.mm(grad_gate_up_PF[piece].t(), x_PH[piece], out=grad_gate_up_EFH[expert])
        tokens = len(grad_TH)
        top_k = len(row_N) // tokens
        return (
            _sum_of_experts(grad_x_PH, row_N, top_k),
            None,
            grad_weights_P[row_N].view(tokens, top_k),
            grad_gate_up_EFH,
            grad_down_EHI,
        )


def _sum_of_experts(y_PH: torch.Tensor, row_N: torch.Tensor, top_k: int) -> torch.Tensor:
    """Each token's sum over its experts; `sum` over a middle axis takes ten times as long."""
    y_TKH = y_PH.index_select(0, row_N).view(-1, top_k, y_PH.shape[1])
    total_TH = y_TKH[:, 0].float()
    for k in range(1, top_k):
        total_TH += y_TKH[:, k]
    return total_TH.to(y_PH.dtype)


def _layout(ids_N: torch.Tensor, experts: int) -> tuple[torch.Tensor, list[tuple[int, slice]], int]:
    """The row of each sorted pair, where each expert's rows lie, and how many rows there are."""
    counts_E = torch.bincount(ids_N, minlength=experts)
    padded_E = (counts_E + _BLOCK - 1) // _BLOCK * _BLOCK
    ends_E = padded_E.cumsum(0)
    gaps_E = (ends_E - padded_E) - (counts_E.cumsum(0) - counts_E)
    rows_N = torch.arange(len(ids_N), device=ids_N.device) + gaps_E[ids_N]
    bounds = [0, *ends_E.tolist()]
    pieces = [(e, slice(bounds[e], bounds[e + 1])) for e in range(experts)]
    return rows_N, [(e, piece) for e, piece in pieces if piece.start < piece.stop], bounds[-1]


def _forward(
    module: nn.Module, x_TH: torch.Tensor, ids_TK: torch.Tensor, weights_TK: torch.Tensor
) -> torch.Tensor:
    out: torch.Tensor = _SortedExperts.apply(
        x_TH, ids_TK, weights_TK, module.gate_up_proj, module.down_proj
    )
    return out


def register() -> str:
    """Makes the name known to transformers (`experts_implementation=`); returns it."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _forward)
    return NAME
