"""The products with AMX tiles, on an emulation of them: any CPU with AVX-512 runs it (amx_emulation.h)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch.nn import functional

from eaas.checkpoint.quantized import QuantizedMatrix, WeightFormat
from eaas.errors import CheckpointError
from emulated_amx import build, missing
from expert_forms import ClampedSwiglu, swiglu
from expert_server.kernels import (
    ExpertKernel,
    KernelSpec,
    ReferenceKernel,
    StoredFormat,
    native,
    panels,
)
from expert_server.kernels.native import NativeKernel
from expert_server.kernels.random_matrix import random_matrix
from expert_server.weights.weights import ExpertForm, ExpertWeights

# Ten seconds of compilation, alone.
pytestmark = pytest.mark.timeout(600)

FP8, MXFP4, INT4, INT8 = WeightFormat.FP8, WeightFormat.MXFP4, WeightFormat.INT4, WeightFormat.INT8
CLAMPED = ExpertForm(True, True, ClampedSwiglu().apply)
SWIGLU = ExpertForm(True, False, swiglu)
RELU = ExpertForm(False, False, functional.relu)
# Few rows, one tile, tiles of unequal height, more than one block of rows.
TOKENS = (1, 2, 4, 5, 15, 16, 17, 33, 100, 512)


@dataclass(frozen=True)
class Weights:
    """A format of weights, the instructions that multiply it, and the relative error of their rounding.

    Attributes:
        stored: None: bfloat16.
        twin: Other instructions that give the same bits.
    """

    stored: StoredFormat | None
    isa: str
    bound: float
    twin: str = ""

    def __str__(self) -> str:
        return str(self.stored or "bfloat16")

    @property
    def spec(self) -> KernelSpec:
        return KernelSpec(torch.bfloat16, stored=self.stored)


def integers(stored: StoredFormat) -> Weights:
    return Weights(stored, "amx-int8", 5e-4, "avx512-vnni")


WEIGHTS = [
    Weights(None, "amx-bf16", 1e-2),
    Weights(StoredFormat(FP8, 128), "amx-bf16", 1e-2),
    Weights(StoredFormat(FP8, 0), "amx-bf16", 1e-2),
    Weights(StoredFormat(MXFP4, 32), "amx-bf16", 1e-2),
    integers(StoredFormat(INT4, 32)),
    integers(StoredFormat(INT4, 32, has_short_scales=True)),
    integers(StoredFormat(INT4, 96, has_short_scales=True)),
    integers(StoredFormat(INT4, 64, has_zeros=True)),
    integers(StoredFormat(INT4, 96)),
    integers(StoredFormat(INT4, 128, has_zeros=True, has_order=True)),
    integers(StoredFormat(INT4, 0, has_zeros=True)),
    integers(StoredFormat(INT8, 0)),
    integers(StoredFormat(INT8, 128)),
    integers(StoredFormat(INT8, 256, has_zeros=True)),
]
each = pytest.mark.parametrize("weights", WEIGHTS, ids=str)
each_of_floats = pytest.mark.parametrize(
    "weights", [one for one in WEIGHTS if one.isa == "amx-bf16"], ids=str
)

# A kernel for a form, with these weights, some instructions and a number of threads.
Create = Callable[..., NativeKernel]


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The extension with emulated tiles."""
    if missing():
        pytest.skip(f"the emulation needs {missing()}")
    return build(tmp_path_factory.mktemp("emulated"), "expert_server/kernels/native", "_native")


@pytest.fixture
def create(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Create]:
    """Makes kernels with emulated tiles, and closes them."""
    for user in (native, panels):
        monkeypatch.setattr(user, "_native", module)
    kernels = []

    def make(form: ExpertForm, weights: Weights, isa: str = "", threads: int = 1) -> NativeKernel:
        spec = KernelSpec(torch.bfloat16, threads=threads, stored=weights.stored)
        kernels.append(NativeKernel([form], spec, isa or weights.isa))
        return kernels[-1]

    yield make
    for kernel in kernels:
        kernel.close()


def expert(weights: Weights, form: ExpertForm, hidden: int, intermediate: int) -> ExpertWeights:
    rng = torch.Generator().manual_seed(hidden)
    width = intermediate * (1 + form.has_gate)

    def matrix(outputs: int, inputs: int) -> torch.Tensor | QuantizedMatrix:
        if weights.stored is not None:
            return random_matrix(weights.stored, outputs, inputs, rng)
        plain = (torch.randn(outputs, inputs, generator=rng) / inputs**0.5).bfloat16()
        return plain.t().contiguous() if form.is_transposed else plain

    return ExpertWeights(matrix(width, hidden), matrix(hidden, intermediate))


def batch(tokens: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
    """Values that are the same in bfloat16, for two experts of which one has most rows."""
    rng = torch.Generator().manual_seed(tokens)
    ids_TK = (torch.rand(tokens, 1, generator=rng) < 0.2).int()
    x_TH = torch.randn(tokens, hidden, generator=rng).bfloat16().float()
    return x_TH, ids_TK, torch.rand(tokens, 1, generator=rng) + 0.1, 0


def load(kernel: ExpertKernel, weights: Weights, form: ExpertForm, *sizes: int) -> None:
    for number in range(2):
        kernel.load(0, number, expert(weights, form, *sizes))


@each
@pytest.mark.parametrize(
    ("form", "sizes"),
    [(SWIGLU, (300, 70)), (RELU, (128, 256)), (CLAMPED, (1312, 160))],
    ids=["swiglu", "relu", "clamped"],
)
def test_equals_the_reference(
    create: Create, weights: Weights, form: ExpertForm, sizes: tuple[int, int]
) -> None:
    """In float64, of the dequantised weights; also where neither a group nor a panel is whole."""
    kernel = create(form, weights, threads=2)
    reference = ReferenceKernel([form], KernelSpec(torch.float64))
    for each_kernel in (kernel, reference):
        load(each_kernel, weights, form, *sizes)
    for tokens in TOKENS:
        one = batch(tokens, sizes[0])
        right_TH = reference(*one)
        error = (kernel(*one) - right_TH).norm() / right_TH.norm()
        assert error < weights.bound, f"{tokens} tokens"


@each
def test_a_token_alone_and_in_a_batch(create: Create, weights: Weights) -> None:
    """Bit for bit: products of few rows are not computed with tiles."""
    kernel, other = create(CLAMPED, weights), create(CLAMPED, weights, threads=3)
    for each_kernel in (kernel, other):
        load(each_kernel, weights, CLAMPED, 1312, 160)
    one = batch(200, 1312)
    out_TH = kernel(*one).clone()
    assert torch.equal(other(*one), out_TH)
    for tokens in TOKENS[:-1]:
        some = slice(3, 3 + tokens)
        assert torch.equal(kernel(*(part[some] for part in one[:3]), 0), out_TH[some]), tokens


@pytest.mark.parametrize("weights", [one for one in WEIGHTS if one.twin], ids=str)
def test_same_bits_with_other_instructions(create: Create, weights: Weights) -> None:
    kernels = [create(SWIGLU, weights, isa) for isa in (weights.isa, weights.twin)]
    for kernel in kernels:
        load(kernel, weights, SWIGLU, 720, 144)
    for tokens in TOKENS:
        out_TH, other_TH = (kernel(*batch(tokens, 720)).clone() for kernel in kernels)
        assert torch.equal(out_TH, other_TH), tokens


@each
def test_poison_stays_in_its_row(create: Create, weights: Weights) -> None:
    kernel = create(SWIGLU, weights)
    load(kernel, weights, SWIGLU, 200, 72)
    for tokens in (3, 9, 40):
        x_TH, ids_TK, scores_TK, _ = batch(tokens, 200)
        clean_TH = kernel(x_TH, ids_TK, scores_TK, 0).clone()
        for poison in (float("nan"), float("inf")):
            x_TH[1, 7] = poison
            out_TH = kernel(x_TH, ids_TK, scores_TK, 0)
            others = torch.arange(tokens) != 1
            assert torch.equal(out_TH[others], clean_TH[others])
            assert bool(out_TH[1].isnan().all())


@pytest.mark.parametrize("rows", [17, 34, 49, 67, 130, 161])
def test_tiles_that_reach_beyond_an_experts_rows(create: Create, rows: int) -> None:
    """NaN of another expert's rows, and then of an earlier batch."""
    weights = WEIGHTS[0]
    kernel, reference = (
        create(SWIGLU, weights),
        ReferenceKernel([SWIGLU], KernelSpec(torch.float64)),
    )
    for each_kernel in (kernel, reference):
        load(each_kernel, weights, SWIGLU, 200, 72)
    x_TH, ids_TK, scores_TK, _ = batch(rows + 20, 200)
    ids_TK[:rows], ids_TK[rows:], x_TH[rows:] = 0, 1, float("nan")
    own = x_TH[:rows], ids_TK[:rows], scores_TK[:rows], 0
    out_TH = kernel(x_TH, ids_TK, scores_TK, 0)[:rows].clone()
    right_TH = reference(*own)
    assert (out_TH - right_TH).norm() < weights.bound * right_TH.norm()
    assert torch.equal(kernel(*own), out_TH)


@each_of_floats
def test_subnormals_are_zero(create: Create, weights: Weights) -> None:
    """As tiles take them: inputs, and sums; whatever the number of rows."""
    kernel = create(RELU, weights)
    load(kernel, weights, RELU, 256, 128)
    x_TH, ids_TK, scores_TK, _ = batch(40, 256)
    for size, is_zero in (
        (1e-30, {False}),
        (1e-37, {False, True}),
        (1e-38, {False, True}),
        (1e-39, {True}),
    ):
        out_TH = kernel(x_TH * size, ids_TK, scores_TK, 0).clone()
        for tokens in (1, 4, 7):
            some = slice(tokens)
            few_TH = kernel(x_TH[some] * size, ids_TK[some], scores_TK[some], 0)
            assert torch.equal(few_TH, out_TH[some])
        assert (not out_TH.any()) in is_zero


def test_every_code_of_fp8(create: Create) -> None:
    """The result of one input of 1 and a weight is the weight: subnormal codes, too."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    wide = torch.zeros(1, len(codes), dtype=torch.uint8)
    wide[0, 0] = 0x38
    up = QuantizedMatrix(FP8, len(codes), len(codes), wide, torch.ones(1, 1))
    down = QuantizedMatrix(FP8, 1, 1, codes[:, None], torch.rand(len(codes), 1))
    check_codes(create, Weights(StoredFormat(FP8, 0), "amx-bf16", 0), up, down)


def test_every_code_and_scale_of_mxfp4(create: Create) -> None:
    """Where scale and weight are normal in float32; the others are nearly nothing."""
    codes = torch.arange(16, dtype=torch.uint8).repeat(253)
    wide = torch.zeros(1, len(codes) // 2, dtype=torch.uint8)
    wide[0, 0] = 2
    ones = torch.full((1, -(-len(codes) // 32)), 127, dtype=torch.uint8)
    up = QuantizedMatrix(MXFP4, len(codes), 32, wide, ones)
    scales = torch.arange(253, dtype=torch.uint8).repeat_interleave(16)[:, None]
    down = QuantizedMatrix(MXFP4, 1, 32, codes[:, None], scales)
    check_codes(create, Weights(StoredFormat(MXFP4, 32), "amx-bf16", 0), up, down)


def check_codes(
    create: Create, weights: Weights, up: QuantizedMatrix, down: QuantizedMatrix
) -> None:
    kernel = create(RELU, weights)
    kernel.load(0, 0, ExpertWeights(up, down))
    wanted, tiny = down.dequantize()[:, 0], torch.finfo(torch.float32).tiny
    is_normal = (wanted.abs() >= tiny) & (down.scales[:, 0] > 0)
    for tokens in (1, 3, 16, 40):
        x_TH = torch.zeros(tokens, len(wanted))
        x_TH[:, 0] = 1
        out_TH = kernel(x_TH, torch.zeros(tokens, 1, dtype=torch.int32), torch.ones(tokens, 1), 0)
        assert torch.equal(out_TH[-1][is_normal], wanted[is_normal]), tokens
        assert float(out_TH[-1][~is_normal].abs().max()) <= 6 * tiny


@pytest.mark.parametrize("exponent", [253, 254, 255])
def test_a_scale_of_mxfp4_that_is_no_number(create: Create, exponent: int) -> None:
    weights = WEIGHTS[3]
    kernel = create(SWIGLU, weights)
    one = expert(weights, SWIGLU, 128, 64)
    assert isinstance(one.down, QuantizedMatrix)
    one.down.scales[5, 1] = exponent
    with pytest.raises(CheckpointError, match="a scale is NaN or infinite"):
        kernel.load(0, 0, one)


def test_auto_takes_the_tiles(create: Create, module: ModuleType) -> None:
    """For every format that they multiply."""
    first = {}
    for _, isa, weights, _ in module.kinds():
        first.setdefault(weights, isa)
    for weights in WEIGHTS:
        assert first[panels.panel_format(weights.spec)] == weights.isa
