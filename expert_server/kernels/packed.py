"""oneDNN's products through torch: weights are packed once at load, a batch's rows sorted once.

bfloat16 weights are in oneDNN's blocked layout. float32 weights stay (out, in): MKL reads these fastest for
few rows, and for more rows oneDNN is about as fast on them as on its blocks.

Bit for bit, a token's result does not depend on other rows' content. It does depend, by rounding, on the
number of rows and their experts: the libraries choose the order of summation by it.

Memory: the buffers here grow to the largest batch seen and stay. torch's products have no `out=`: each
returns a new tensor. Chunks of 512 rows keep these below the 32 MiB up to which malloc reuses memory instead
of requesting pages, so the steady state has no page faults.

N rows of a chunk, J outputs of the up product (2I with a gate, else I).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from eaas.checkpoint.pieces import Pause
from expert_server.kernels.activation import ActivationKind, recognise
from expert_server.kernels.grouping import batches, group_rows
from expert_server.kernels.kernel import ExpertKernel, KernelSpec, Quantization, UnsupportedError
from expert_server.kernels.products import Products, best_products
from expert_server.weights.memory import trim
from expert_server.weights.weights import ExpertForm, ExpertWeights

__all__ = ["PackedExpert", "PackedKernel"]

_CHUNK_ROWS = 512
# Rows are weighted and added in pieces of this size, which fit the L2 cache.
_SUM_BYTES = 1 << 20
# Freed expert memory beyond this, or beyond this share of the memory held, returns to the system. oneDNN
# allocates with malloc, which cannot place a block into the gap left by one of the same size: with constant
# loading and unloading, the gaps reach 0.4 of the weights.
_KEPT_BYTES, _KEPT_SHARE = 64 << 20, 8


class _Linear(NamedTuple):
    """A packed matrix and its bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, eq=False)
class PackedExpert:
    """One expert; gate and up are consecutive, whatever the checkpoint's order.

    Attributes:
        up, down: Packed.
        nbytes: Memory, padding included.
    """

    up: _Linear
    down: _Linear
    nbytes: int


class PackedKernel(ExpertKernel):
    """See the module.

    Raises:
        UnsupportedError: The dtype is neither bfloat16 nor float32, or quantisation is configured.
    """

    name = "packed"
    _packed: dict[tuple[int, int], PackedExpert]  # type: ignore[assignment]

    def __init__(self, forms: Sequence[ExpertForm], spec: KernelSpec) -> None:
        super().__init__(forms, spec)
        if spec.quantization is not Quantization.NONE:
            raise UnsupportedError(
                f"{spec.quantization} weights: torch's products take weights of the activations' dtype"
            )
        if spec.dtype not in (torch.bfloat16, torch.float32):
            raise UnsupportedError(f"{spec.dtype}: it computes in bfloat16 or float32")
        self._products = self._products_of(spec.dtype)
        self._activations = {form: recognise(form) for form in self.forms}
        self._scratch: dict[str, torch.Tensor] = {}
        self._dropped = 0

    def pack(self, weights: ExpertWeights, form: ExpertForm, pause: Pause) -> PackedExpert:
        """Pack an expert. Each matrix is one piece, whatever its size."""
        weights = weights.plain(form)
        up, up_bias = weights.up, weights.up_bias
        activation = self._activations[form]
        if activation is not None and activation.is_interleaved:
            up, up_bias = _apart(up), None if up_bias is None else _apart(up_bias)
        pause()
        linear = self._linear(up, up_bias)
        pause()
        linears = linear, self._linear(weights.down, weights.down_bias)
        nbytes = sum(
            self._products.nbytes(weight) + (0 if bias is None else bias.nbytes)
            for weight, bias in linears
        )
        return PackedExpert(*linears, nbytes)

    def unload(self, layer: int, expert: int) -> None:
        """See `ExpertKernel`. Freed memory returns to the system in tens of megabytes."""
        before = self.bytes
        super().unload(layer, expert)
        self._dropped += before - self.bytes
        if self._dropped > max(_KEPT_BYTES, self.bytes // _KEPT_SHARE):
            self._dropped = 0
            trim()

    @torch.inference_mode()
    def __call__(
        self,
        x_TH: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        scores_TK: torch.Tensor,
        layer: int,
    ) -> torch.Tensor:
        """See `ExpertKernel`."""
        form = self._form(layer)
        self._check_shapes(x_TH, expert_ids_TK, scores_TK)
        rows = group_rows(expert_ids_TK, scores_TK)
        experts = [self._held(layer, expert) for expert in rows.experts]
        self._count(layer, rows.experts, rows.ends)
        tokens, hidden = x_TH.shape
        if x_TH.dtype != self.spec.dtype:
            x_TH = self._buffer("x", tokens, hidden).copy_(x_TH)
        out_TH = self._buffer("out", tokens, hidden, torch.float32).zero_()
        for runs in batches(rows.ends, _CHUNK_ROWS):
            chunk = slice(runs[0].start, runs[-1].end)
            token_N = rows.token_N[chunk]
            x_NH = self._buffer("rows", chunk.stop - chunk.start, hidden)
            torch.index_select(x_TH, 0, token_N, out=x_NH)
            sizes = [run.end - run.start for run in runs]
            product_NJ = self._multiply(x_NH, sizes, [experts[run.place].up for run in runs])
            hidden_NI = self._activate(product_NJ, form)
            y_NH = self._multiply(hidden_NI, sizes, [experts[run.place].down for run in runs])
            self._add(out_TH, y_NH, token_N, rows.score_N[chunk, None])
        return out_TH

    def close(self) -> None:
        """See `ExpertKernel`."""
        super().close()
        self._scratch.clear()
        trim()

    def _products_of(self, dtype: torch.dtype) -> Products:
        return best_products(dtype)

    def _linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> _Linear:
        if bias is not None:
            bias = bias.to(self.spec.dtype, copy=True).flatten()
        return _Linear(self._products.pack(weight), bias)

    def _held(self, layer: int, expert: int) -> PackedExpert:
        packed = self._packed.get((layer, expert))
        if packed is None:
            raise self._not_held(layer, expert)
        return packed

    def _multiply(
        self, x_N: torch.Tensor, sizes: list[int], linears: list[_Linear]
    ) -> torch.Tensor:
        """Multiply each expert's rows by its matrix, all rows in one tensor."""
        multiply = self._products.multiply
        parts = [
            multiply(part, weight, bias)
            for part, (weight, bias) in zip(torch.split(x_N, sizes), linears, strict=True)
        ]
        if len(parts) == 1:
            return parts[0]
        out_N = self._buffer("product", x_N.shape[0], parts[0].shape[1])
        return torch.cat(parts, out=out_N)

    def _activate(self, product_NJ: torch.Tensor, form: ExpertForm) -> torch.Tensor:
        """Compute the down product's input; overwrites the up product."""
        activation = self._activations[form]
        if activation is None:
            return form.activate(product_NJ)
        if not activation.has_gate:
            return _apply(activation.kind, product_NJ)
        gate_NI, up_NI = product_NJ.chunk(2, dim=1)
        hidden_NI = self._buffer("hidden", *gate_NI.shape)
        if activation.kind is ActivationKind.CLAMPED_SWIGLU:
            gate_NI.clamp_(max=activation.limit)
            up_NI.clamp_(-activation.limit, activation.limit).add_(1)
            torch.mul(gate_NI, activation.alpha, out=hidden_NI).sigmoid_().mul_(gate_NI)
            return hidden_NI.mul_(up_NI)
        return torch.mul(_apply(activation.kind, gate_NI), up_NI, out=hidden_NI)

    def _add(
        self,
        out_TH: torch.Tensor,
        y_NH: torch.Tensor,
        token_N: torch.Tensor,
        score_N1: torch.Tensor,
    ) -> None:
        """Add the rows' weighted results, one row after another, in ascending order of experts."""
        hidden = out_TH.shape[1]
        step = max(1, _SUM_BYTES // (4 * hidden))
        for start in range(0, y_NH.shape[0], step):
            piece = slice(start, start + step)
            token_P = token_N[piece]
            weighted_PH = self._buffer("weighted", token_P.shape[0], hidden, torch.float32)
            # Two passes are faster than torch's product of a bfloat16 and a float32 tensor.
            weighted_PH.copy_(y_NH[piece]).mul_(score_N1[piece])
            out_TH.index_add_(0, token_P, weighted_PH)

    def _buffer(
        self, name: str, rows: int, columns: int, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A view of the named buffer, with undefined content. A buffer has one dtype."""
        size = rows * columns
        buffer = self._scratch.get(name)
        if buffer is None or buffer.shape[0] < size:
            capacity = max(size, 0 if buffer is None else 2 * buffer.shape[0])
            buffer = self._scratch[name] = torch.empty(capacity, dtype=dtype or self.spec.dtype)
        return buffer[:size].view(rows, columns)


def _apply(kind: ActivationKind, x: torch.Tensor) -> torch.Tensor:
    """Apply the formula to the gate, in place."""
    match kind:
        case ActivationKind.SILU:
            return functional.silu(x, inplace=True)
        case ActivationKind.GELU:
            return torch.ops.aten.gelu_(x)  # type: ignore[no-any-return]
        case ActivationKind.GELU_TANH:
            return torch.ops.aten.gelu_(x, approximate="tanh")  # type: ignore[no-any-return]
        case ActivationKind.RELU:
            return x.relu_()
        case ActivationKind.RELU_SQUARED:
            return x.relu_().square_()
        case _:
            raise ValueError(f"{kind.name} needs a gate")


def _apart(interleaved: torch.Tensor) -> torch.Tensor:
    """Separate gate and up rows: (2I, ...) -> (2, I, ...). A view."""
    return torch.unflatten(interleaved, 0, (-1, 2)).transpose(0, 1)
