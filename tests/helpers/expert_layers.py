"""Every kernel with every format of weights, random experts and batches, and the error of a result."""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn import functional

from eaas.checkpoint.quantized import FP8, INT4, INT8, MXFP4
from emulated_amx import build, missing
from expert_server.kernels import (
    ExpertKernel,
    KernelSpec,
    Quantization,
    ReferenceKernel,
    StoredFormat,
    native,
    panels,
)
from expert_server.kernels.choose import ON_REQUEST
from expert_server.kernels.native import NativeKernel, available_isas
from expert_server.kernels.random_matrix import random_matrix
from expert_server.weights.weights import ExpertForm, ExpertWeights
from interpreted_triton import interpreted_kernel

__all__ = [
    "BOUND",
    "FLOATS",
    "FORMATS",
    "FORMS",
    "STORED",
    "TRITON",
    "Candidate",
    "Layer",
    "batch",
    "check_unloading",
    "expert",
    "in_slots",
    "layer",
    "over",
    "relative_error",
    "swiglu",
]

BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# Activations of 15 bits, which integers multiply.
INTEGER_BOUND = 5e-4
FORMATS = [
    StoredFormat(FP8, 128),
    StoredFormat(FP8, 0),
    StoredFormat(MXFP4, 32),
    StoredFormat(INT4, 32),
    StoredFormat(INT4, 32, has_short_scales=True),
    StoredFormat(INT4, 96, has_order=True, has_short_scales=True),
    StoredFormat(INT4, 64, has_zeros=True),
    StoredFormat(INT4, 96),
    StoredFormat(INT4, 128, has_zeros=True, has_order=True),
    StoredFormat(INT4, 0, has_zeros=True),
    StoredFormat(INT8, 0),
    StoredFormat(INT8, 0, has_zeros=True),
    StoredFormat(INT8, 128, has_order=True),
    StoredFormat(INT8, 256, has_zeros=True),
    StoredFormat(INT8, 32),
    StoredFormat(INT8, 96, has_zeros=True),
]


def swiglu(product: torch.Tensor) -> torch.Tensor:
    gate, up = product.chunk(2, dim=-1)
    return functional.silu(gate) * up


class ClampedSwiglu:
    """GPT-OSS's: interleaved, clamped, shifted."""

    alpha, limit = 1.702, 7.0

    def apply(self, product: torch.Tensor) -> torch.Tensor:
        gate, up = product[..., ::2], product[..., 1::2]
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(gate * self.alpha) * (up + 1)


def interleaved(product: torch.Tensor) -> torch.Tensor:
    return functional.silu(product[..., ::2]) * product[..., 1::2]


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
    "interleaved": ExpertForm(True, True, interleaved),
}


@cache
def emulated() -> ModuleType:
    """The compiled kernel's extension with emulated AMX tiles, for a CPU without them."""
    if missing():
        pytest.skip(f"the emulation needs {missing()}")
    with tempfile.TemporaryDirectory() as folder:
        return build(Path(folder), "expert_server/kernels/native", "_native")


@dataclass(frozen=True)
class Candidate:
    """A kernel with weights of one format.

    Attributes:
        isa: The instruction set of the compiled kernel (empty: the best one), "triton" (interpreted), "gpu"
            (the same on a GPU) or "reference".
        is_emulated: Its AMX tiles are (`amx_emulation.h`): this CPU has none.
    """

    spec: KernelSpec
    isa: str
    is_emulated: bool = False

    def __str__(self) -> str:
        spec = self.spec
        is_quantized = spec.quantization is not Quantization.NONE
        return f"{spec.stored or (spec.quantization if is_quantized else str(spec.dtype)[6:])}-{self.isa}"

    @property
    def dtype(self) -> torch.dtype:
        return self.spec.dtype

    @property
    def is_native(self) -> bool:
        return self.isa not in ("triton", "reference")

    @property
    def has_tiles(self) -> bool:
        return self.isa.startswith("amx")

    @property
    def bound(self) -> float:
        """Largest relative error: of rows that are rounded to bfloat16, to 15 bits, or not at all."""
        if self.spec.quantization is not Quantization.NONE or self.isa in (
            "amx-int8",
            "avx512-vnni",
        ):
            return INTEGER_BOUND
        if self.spec.stored is None or self.isa in ("amx-bf16", "avx512-bf16", "triton", "gpu"):
            return BOUND[self.dtype]
        return BOUND[torch.float32]

    def create(self, form: ExpertForm, threads: int = 1) -> Any:
        """Make the kernel; within `installed` only."""
        if self.isa == "reference":
            return ReferenceKernel([form], self.spec)
        if self.isa == "triton":
            return interpreted_kernel()([form], self.spec)
        if self.isa == "gpu":
            return ON_REQUEST["triton"]([form], self.spec)
        return NativeKernel([form], replace(self.spec, threads=threads), self.isa or None)

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Interpret Triton's code, which reads the variable also later, or emulate tiles."""
        with pytest.MonkeyPatch.context() as patch:
            if self.isa == "triton":
                patch.setenv("TRITON_INTERPRET", "1")
                pytest.importorskip("triton", reason="extra `triton` is not installed")
            for user in (native, panels) if self.is_emulated else ():
                patch.setattr(user, "_native", emulated())
            yield

    def weights(
        self, form: ExpertForm, hidden: int, intermediate: int, rng: torch.Generator
    ) -> ExpertWeights:
        """An expert in the format."""
        return expert(form, hidden, intermediate, self.dtype, rng, self.spec.stored)

    def batch(
        self, tokens: int, hidden: int, ids: Any, top_k: int, seed: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """`batch`, but results for stored weights are not rounded to bfloat16."""
        x_TH, ids_TK, scores_TK = batch(tokens, hidden, ids, top_k, self.dtype, seed)
        return x_TH if self.spec.stored is None else x_TH.float(), ids_TK, scores_TK


def compiled(spec: KernelSpec) -> Iterator[Candidate]:
    """Yield the compiled kernel with each of its instruction sets, and with tiles on any CPU."""
    isas = available_isas(spec)
    is_integer = spec.quantization is not Quantization.NONE or "avx512-vnni" in isas
    tiles = "amx-int8" if is_integer else "amx-bf16"
    if tiles not in isas and spec != KernelSpec(torch.float32):
        yield Candidate(spec, tiles, is_emulated=True)
    for isa in isas:
        yield Candidate(spec, isa)


_BF16 = [KernelSpec(torch.bfloat16, stored=stored) for stored in FORMATS]
_PLAIN = [KernelSpec(dtype) for dtype in BOUND]
FLOATS = [
    *(
        each
        for quantization in (Quantization.INT8, Quantization.INT4)
        for each in compiled(KernelSpec(torch.float32, quantization))
    ),
    *(each for spec in _PLAIN for each in (*compiled(spec), Candidate(spec, "reference"))),
]
STORED = [each for spec in _BF16 for each in compiled(spec)]
TRITON = [Candidate(spec, "triton") for spec in (*_PLAIN, *_BF16[:3])]


def over(candidates: Iterable[Candidate]) -> pytest.MarkDecorator:
    """Run a test with each of some kernels, as its argument `candidate`."""
    return pytest.mark.parametrize("candidate", list(candidates), ids=str)


@dataclass
class Layer:
    """The same experts in a kernel and in the reference in float64."""

    kernel: Any
    reference: ReferenceKernel
    weights: list[ExpertWeights]

    def error(self, *one: torch.Tensor) -> float:
        """Relative, of the whole batch (`relative_error`)."""
        return relative_error(self.kernel, self.reference, *one)


@contextmanager
def layer(
    candidate: Candidate,
    form: str | ExpertForm,
    hidden: int,
    intermediate: int,
    experts: int,
    seed: int = 0,
) -> Iterator[Layer]:
    """Make experts and load them into the kernel and the reference."""
    form = FORMS[form] if isinstance(form, str) else form
    rng = torch.Generator().manual_seed(seed)
    with candidate.installed():
        kernel = candidate.create(form, threads=1 + seed % 3)
        quantization = candidate.spec.quantization
        reference = ReferenceKernel([form], KernelSpec(torch.float64, quantization))
        weights = [candidate.weights(form, hidden, intermediate, rng) for _ in range(experts)]
        for number, one in enumerate(weights):
            kernel.load(0, number, one)
            reference.load(0, number, one)
        try:
            yield Layer(kernel, reference, weights)
        finally:
            kernel.close()


def expert(
    form: ExpertForm,
    hidden: int,
    intermediate: int,
    dtype: torch.dtype,
    rng: torch.Generator,
    stored: StoredFormat | None = None,
) -> ExpertWeights:
    """Random weights: of a format, with biases in float32, or floats of a dtype."""

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=rng)

    width = 2 * intermediate if form.has_gate else intermediate
    biases = (normal(width), normal(hidden)) if form.is_transposed else (None, None)
    if stored is not None:
        up, down = (
            random_matrix(stored, *shape, rng)
            for shape in ((width, hidden), (hidden, intermediate))
        )
        return ExpertWeights(up, down, *biases)
    up, down = normal(width, hidden) / hidden**0.5, normal(hidden, intermediate) / intermediate**0.5
    if form.is_transposed:
        up, down = up.t().contiguous(), down.t().contiguous()
    return ExpertWeights(up, down, *biases).to(dtype)


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


def in_slots(
    memory: mmap.mmap, batches: Iterable[tuple[torch.Tensor, ...]]
) -> tuple[list[tuple[torch.Tensor, ...]], list[torch.Tensor]]:
    """Write batches into shared memory, ids as int32; return them there, and places for their results."""
    slots, at = torch.frombuffer(memory, dtype=torch.uint8), 0
    requests, results = [], []
    for x_TH, ids_TK, scores_TK in batches:
        there = []
        for each in (x_TH, ids_TK.int(), scores_TK, torch.full(x_TH.shape, 7.0)):
            there.append(slots[at : at + each.nbytes].view(each.dtype).view(each.shape))
            there[-1].copy_(each)
            at += -(-each.nbytes // 64) * 64
        requests.append(tuple(there[:3]))
        results.append(there[3])
    return requests, results


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
