"""Experts as quantised checkpoints store them, against the reference in float64 with dequantised weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from eaas.checkpoint.quantized import QuantizedMatrix, WeightFormat
from eaas.errors import CheckpointError
from expert_forms import ClampedSwiglu, swiglu
from expert_layers import stored_expert
from expert_server.kernels import ExpertKernel, KernelSpec, ReferenceKernel, StoredFormat, _native
from expert_server.kernels.kernel import Quantization, UnsupportedError
from expert_server.kernels.native import NativeKernel, available_isas
from expert_server.weights.weights import ExpertForm, ExpertWeights

FP8, MXFP4, INT4, INT8 = WeightFormat.FP8, WeightFormat.MXFP4, WeightFormat.INT4, WeightFormat.INT8
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
]
# Rows that a product rounds to bfloat16, to 15 bits, or not at all.
BOUND = {"amx-bf16": 1e-2, "avx512-bf16": 1e-2, "amx-int8": 5e-4, "avx512-vnni": 5e-4}
EXACT = 1e-5


FORMS = {
    "swiglu": ExpertForm(True, False, swiglu),
    "clamped": ExpertForm(True, True, ClampedSwiglu().apply),
    "relu": ExpertForm(False, False, functional.relu),
}


@dataclass(frozen=True)
class Candidate:
    """The compiled kernel with a format and one of its instruction sets."""

    stored: StoredFormat
    isa: str

    def __str__(self) -> str:
        return f"{self.stored}-{self.isa}"

    @property
    def bound(self) -> float:
        return BOUND.get(self.isa, EXACT)

    def create(self, form: ExpertForm, threads: int = 1) -> NativeKernel:
        spec = KernelSpec(torch.bfloat16, threads=threads, stored=self.stored)
        return NativeKernel([form], spec, self.isa)


each = pytest.mark.parametrize(
    "candidate",
    [
        Candidate(stored, isa)
        for stored in FORMATS
        for isa in available_isas(KernelSpec(torch.bfloat16, stored=stored))
    ],
    ids=str,
)
each_format = pytest.mark.parametrize("stored", FORMATS, ids=str)


def batch(tokens: int, hidden: int, experts: int, top_k: int, seed: int) -> tuple[Any, ...]:
    """Values that are the same in bfloat16."""
    rng = torch.Generator().manual_seed(seed)
    return (
        torch.randn(tokens, hidden, generator=rng).bfloat16().float(),
        torch.randint(-1, experts, (tokens, top_k), generator=rng),
        torch.rand(tokens, top_k, generator=rng) + 0.1,
        0,
    )


def load_both(
    candidate: Candidate, form: ExpertForm, hidden: int, intermediate: int, seed: int
) -> tuple[ExpertKernel, ReferenceKernel]:
    """Two experts in the kernel and in the reference in float64."""
    rng = torch.Generator().manual_seed(seed)
    kernel, reference = (
        candidate.create(form, 1 + seed % 2),
        ReferenceKernel([form], KernelSpec(torch.float64)),
    )
    for number in range(2):
        weights = stored_expert(candidate.stored, form, hidden, intermediate, rng)
        kernel.load(0, number, weights)
        reference.load(0, number, weights)
    return kernel, reference


def error(kernel: ExpertKernel, reference: ExpertKernel, one: tuple[Any, ...]) -> float:
    """Relative; a tenth of the usual result counts as its size at least."""
    right_TH = reference(*one)
    usual = one[2].where(one[1] >= 0, 0.0).norm().item() * one[0].shape[1] ** 0.5
    norm = max(right_TH.norm().item(), 0.1 * usual, 1e-30)
    return float((kernel(*one) - right_TH).norm()) / norm


sizes = st.one_of(st.integers(8, 70), st.sampled_from([96, 128, 144, 200, 256, 300]))


@each
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_equals_the_reference(candidate: Candidate, data: st.DataObject) -> None:
    form = FORMS[data.draw(st.sampled_from(sorted(FORMS)))]
    hidden, intermediate = data.draw(sizes), data.draw(sizes)
    tokens = data.draw(st.sampled_from([0, 1, 2, 3, 8, 17, 64]))
    seed = data.draw(st.integers(0, 9))
    kernel, reference = load_both(candidate, form, hidden, intermediate, seed)
    assert error(kernel, reference, batch(tokens, hidden, 2, 2, seed)) < candidate.bound
    kernel.close()


@each
def test_a_token_alone_and_in_a_batch(candidate: Candidate) -> None:
    """Bit for bit, whatever the batch and the threads."""
    kernel, reference = load_both(candidate, FORMS["clamped"], 1312, 160, 1)
    one = batch(64, 1312, 2, 1, 0)
    assert error(kernel, reference, one) < candidate.bound
    out_TH = kernel(*one).clone()
    for tokens in (1, 2, 3, 5, 8, 16, 63):
        some = slice(1, 1 + tokens)
        assert torch.equal(kernel(*(part[some] for part in one[:3]), 0), out_TH[some])
    lone = candidate.create(FORMS["clamped"], 3)
    rng = torch.Generator().manual_seed(1)
    for number in range(2):
        lone.load(0, number, stored_expert(candidate.stored, FORMS["clamped"], 1312, 160, rng))
    assert torch.equal(lone(*one), out_TH)
    for each_kernel in (kernel, lone):
        each_kernel.close()


@each
def test_poison_stays_in_its_row(candidate: Candidate) -> None:
    kernel, _ = load_both(candidate, FORMS["swiglu"], 200, 72, 0)
    x_TH, ids_TK, scores_TK, _ = batch(9, 200, 2, 2, 0)
    clean_TH = kernel(x_TH, ids_TK.abs(), scores_TK, 0).clone()
    x_TH[4, 7] = float("nan")
    out_TH = kernel(x_TH, ids_TK.abs(), scores_TK, 0).clone()
    kernel.close()
    others = torch.arange(9) != 4
    assert torch.equal(out_TH[others], clean_TH[others])
    assert bool(out_TH[4].isnan().all())


@pytest.mark.parametrize("isa", available_isas(KernelSpec(torch.bfloat16, stored=FORMATS[0])))
def test_every_code_of_fp8(isa: str) -> None:
    """The result of one input of 1 and a weight is the weight: subnormals, too."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    up = QuantizedMatrix(FP8, 1, 1, torch.tensor([[0x38]], dtype=torch.uint8), torch.ones(1, 1))
    down = QuantizedMatrix(FP8, 1, 1, codes[:, None], torch.ones(len(codes), 1))
    check_codes(StoredFormat(FP8, 0), isa, up, down)


@pytest.mark.parametrize("isa", available_isas(KernelSpec(torch.bfloat16, stored=FORMATS[2])))
def test_every_code_of_mxfp4(isa: str) -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    up = QuantizedMatrix(
        MXFP4, 1, 32, torch.tensor([[2]], dtype=torch.uint8), torch.full((1, 1), 127).byte()
    )
    scales = (torch.arange(16, dtype=torch.uint8) + 120)[:, None]
    check_codes(
        StoredFormat(MXFP4, 32), isa, up, QuantizedMatrix(MXFP4, 1, 32, codes[:, None], scales)
    )


def check_codes(stored: StoredFormat, isa: str, up: QuantizedMatrix, down: QuantizedMatrix) -> None:
    hidden = down.shape[0]
    wide = replace(
        up,
        inputs=hidden,
        group=32 if up.format is MXFP4 else hidden,
        codes=functional.pad(up.codes, (0, -(-hidden * up.format.bits // 8) - 1)),
        scales=up.scales.expand(1, -(-hidden // 32 if up.format is MXFP4 else 1)).contiguous(),
    )
    kernel = NativeKernel(
        [ExpertForm(False, False, functional.relu)], KernelSpec(torch.bfloat16, stored=stored), isa
    )
    kernel.load(0, 0, ExpertWeights(wide, down))
    x_TH = torch.zeros(3, hidden)
    x_TH[:, 0] = 1
    out_TH = kernel(x_TH, torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1), 0)
    kernel.close()
    assert torch.equal(out_TH[1], down.dequantize()[:, 0])


@each_format
def test_a_kernel_of_float32_takes_exact_rows(stored: StoredFormat) -> None:
    rng = torch.Generator().manual_seed(0)
    kernel = NativeKernel([FORMS["swiglu"]], KernelSpec(torch.float32, stored=stored))
    reference = ReferenceKernel([FORMS["swiglu"]], KernelSpec(torch.float64, stored=stored))
    weights = stored_expert(stored, FORMS["swiglu"], 136, 48, rng)
    for each_kernel in (kernel, reference):
        each_kernel.load(0, 0, weights)
    one = batch(5, 136, 1, 1, 0)
    assert error(kernel, reference, (torch.randn(5, 136, generator=rng), *one[1:])) < EXACT
    kernel.close()


@each_format
def test_packing_in_pieces_and_strided_rows(
    stored: StoredFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = torch.Generator().manual_seed(0)
    spec = KernelSpec(torch.bfloat16, stored=stored)
    weights = stored_expert(stored, FORMS["clamped"], 300, 70, rng)
    kernel = NativeKernel([FORMS["clamped"]], spec)
    whole = kernel.pack(weights, FORMS["clamped"], lambda: None)
    monkeypatch.setattr("expert_server.kernels.panels.PIECE_BYTES", 4096)
    pauses: list[None] = []
    pieces = kernel.pack(weights, FORMS["clamped"], lambda: pauses.append(None))
    assert torch.equal(whole.memory, pieces.memory)
    assert len(pauses) > 6
    kernel.close()


@each_format
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_scale_that_is_no_number(stored: StoredFormat, poison: float) -> None:
    kernel = NativeKernel([FORMS["swiglu"]], KernelSpec(torch.bfloat16, stored=stored))
    weights = stored_expert(stored, FORMS["swiglu"], 256, 40, torch.Generator().manual_seed(0))
    assert isinstance(weights.up, QuantizedMatrix)
    weights.up.scales[33, -1] = 255 if stored.format is MXFP4 else poison
    with pytest.raises(CheckpointError, match="a scale is NaN or infinite"):
        kernel.load(0, 0, weights)
    assert not kernel.count
    kernel.close()


@pytest.mark.parametrize(
    ("wanted", "given"),
    [
        (StoredFormat(INT4, 128), StoredFormat(INT4, 64)),
        (StoredFormat(INT4, 128), StoredFormat(INT8, 128)),
        (StoredFormat(INT8, 128), StoredFormat(INT8, 128, has_zeros=True)),
        (StoredFormat(FP8, 0), StoredFormat(FP8, 128)),
    ],
)
def test_a_matrix_of_another_format(wanted: StoredFormat, given: StoredFormat) -> None:
    kernel = NativeKernel([FORMS["swiglu"]], KernelSpec(torch.bfloat16, stored=wanted))
    weights = stored_expert(given, FORMS["swiglu"], 256, 256, torch.Generator().manual_seed(0))
    with pytest.raises(CheckpointError) as caught:
        kernel.load(0, 0, weights)
    assert str(given) in str(caught.value)
    assert str(wanted) in str(caught.value)
    kernel.close()


def test_floats_and_codes_are_not_mixed() -> None:
    form = FORMS["swiglu"]
    codes = stored_expert(StoredFormat(FP8, 0), form, 32, 16, torch.Generator().manual_seed(0))
    floats = codes.copy(torch.bfloat16)
    for stored, weights in ((None, codes), (StoredFormat(FP8, 0), floats)):
        kernel = NativeKernel([form], KernelSpec(torch.bfloat16, stored=stored))
        with pytest.raises(CheckpointError, match="quantise all routed experts alike"):
            kernel.load(0, 0, weights)
        kernel.close()


@pytest.mark.parametrize(
    ("stored", "supported"),
    [
        (StoredFormat(INT4, 48), "int4 .groups of 48.*multiples of 32"),
        (StoredFormat(INT8, 64), "int8 .groups of 64.*multiples of 128"),
        (StoredFormat(INT8, 64, has_zeros=True), "int8 .groups of 64.*multiples of 128"),
        (StoredFormat(FP8, 64), "fp8 .groups of 64.*multiples of 128"),
        (StoredFormat(FP8, 128, has_zeros=True), "no zero points"),
    ],
)
def test_groups_that_no_panels_hold(stored: StoredFormat, supported: str) -> None:
    with pytest.raises(UnsupportedError, match=supported):
        NativeKernel([FORMS["swiglu"]], KernelSpec(torch.bfloat16, stored=stored))


def test_what_is_quantised_is_not_quantised_again() -> None:
    with pytest.raises(ValueError, match="cannot be quantised to int8"):
        KernelSpec(torch.bfloat16, Quantization.INT8, stored=FORMATS[0])


def test_short_scales_take_half_of_the_memory() -> None:
    """4.5 bits a weight instead of 5; zero points need the longer ones."""
    sizes = []
    for short, zeros in ((False, False), (True, False), (True, True)):
        stored = StoredFormat(INT4, 32, zeros, has_short_scales=short)
        kernel = NativeKernel([FORMS["swiglu"]], KernelSpec(torch.bfloat16, stored=stored))
        rng = torch.Generator().manual_seed(0)
        kernel.load(0, 0, stored_expert(stored, FORMS["swiglu"], 1024, 512, rng))
        sizes.append(kernel.bytes * 8 / (3 * 1024 * 512))
        kernel.close()
    assert sizes == [5.0, 4.5, 5.0]


def test_every_format_has_panels() -> None:
    assert {"fp8", "mxfp4", "int4", "int4 in groups"} < _native.formats().keys()
