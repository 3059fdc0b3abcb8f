"""An expert server's reference kernel: one expert after another, in transformers' order of operations.

All other kernels are tested against it. T tokens, K top-k, H hidden, N tokens of one expert.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from eaas.checkpoint.pieces import Pause
from expert_server.kernels.kernel import ExpertKernel, Quantization
from expert_server.kernels.quantize import fake_quantize
from expert_server.weights.weights import ExpertForm, ExpertWeights

__all__ = ["ReferenceKernel"]


class ReferenceKernel(ExpertKernel):
    """Loops over the experts that have tokens; in float32 equal to transformers' `eager`."""

    name = "reference"
    _packed: dict[tuple[int, int], ExpertWeights]  # type: ignore[assignment]

    def pack(self, weights: ExpertWeights, form: ExpertForm, pause: Pause) -> ExpertWeights:
        """Copy an expert's weights in the kernel's dtype, dequantised; quantised before if configured."""
        pause()
        weights = weights.dequantize(form, self.spec.dtype)
        if self.spec.quantization is not Quantization.NONE:
            exact = weights.to(torch.promote_types(self.spec.dtype, torch.float32))
            weights = fake_quantize(exact, form, self.spec.quantization)
        return weights.copy(self.spec.dtype)

    @torch.inference_mode()
    def compute(
        self, x_TH: torch.Tensor, ids_TK: torch.Tensor, scores_TK: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """Compute a batch, one expert after another; the sum is float32, or float64 if that is the dtype."""
        form = self.forms[layer]
        sum_dtype = torch.promote_types(self.spec.dtype, torch.float32)
        out_TH = torch.zeros(x_TH.shape, dtype=sum_dtype)
        ids_KT = ids_TK.T
        # Group shrink: only experts with tokens; ascending, so that the order of the sum is fixed.
        for expert in torch.unique(ids_TK).tolist():
            if expert == -1:
                continue
            weights = self._packed.get((layer, expert))
            if weights is None:
                raise self._not_held(layer, expert)
            k_N, token_N = torch.where(ids_KT == expert)
            if self._counts_LX is not None:
                self._counts_LX[layer, [0, 1 + expert]] += 1, len(token_N)
            y_NH = expert_forward(x_TH[token_N], weights, form)
            weighted_NH = y_NH.to(sum_dtype) * scores_TK[token_N, k_N, None]
            if x_TH.dtype is torch.bfloat16:
                # So that the sum is exact: see `eaas.wire.slot`.
                weighted_NH = weighted_NH.bfloat16().to(sum_dtype)
            out_TH.index_add_(0, token_N, weighted_NH)
        return out_TH


def expert_forward(x_NH: torch.Tensor, weights: ExpertWeights, form: ExpertForm) -> torch.Tensor:
    """Compute one expert's output for its tokens, (N, H) in the weights' dtype, without router scores."""
    up, down = weights.up, weights.down
    assert isinstance(up, torch.Tensor)
    assert isinstance(down, torch.Tensor)
    hidden_NI = _linear(x_NH.to(up.dtype), up, weights.up_bias, form.is_transposed)
    hidden_NI = form.activate(hidden_NI)
    return _linear(hidden_NI, down, weights.down_bias, form.is_transposed)


def _linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, is_transposed: bool
) -> torch.Tensor:
    if not is_transposed:
        return functional.linear(x, weight, bias)
    # Product and sum are separate rather than `addmm`, to round as transformers does.
    return x @ weight if bias is None else x @ weight + bias
