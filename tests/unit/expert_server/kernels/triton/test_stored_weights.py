"""Kernel `triton`, interpreted, on weights as checkpoints store them: the cases of `test_stored.py`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from eaas.checkpoint.quantized import QuantizedMatrix, WeightFormat
from eaas.errors import CheckpointError
from expert_layers import FORMS, relative_error, stored_expert
from expert_server.kernels import ExpertKernel, KernelSpec, ReferenceKernel, StoredFormat
from expert_server.kernels.kernel import Quantization, UnsupportedError
from expert_server.weights.weights import ExpertForm, ExpertWeights
from interpreted_triton import interpreted_kernel, needs_triton

pytestmark = needs_triton

FP8, MXFP4, INT4, INT8 = WeightFormat.FP8, WeightFormat.MXFP4, WeightFormat.INT4, WeightFormat.INT8
FORMATS = [StoredFormat(FP8, 128), StoredFormat(FP8, 0), StoredFormat(MXFP4, 32)]
BOUND = 1e-2
each_format = pytest.mark.parametrize("stored", FORMATS, ids=str)


def batch(tokens: int, hidden: int, seed: int) -> tuple[torch.Tensor, ...]:
    """Values that are the same in bfloat16, and ids of two experts or none."""
    rng = torch.Generator().manual_seed(seed)
    return (
        torch.randn(tokens, hidden, generator=rng).bfloat16().float(),
        torch.randint(-1, 2, (tokens, 2), generator=rng),
        torch.rand(tokens, 2, generator=rng) + 0.1,
    )


@contextmanager
def load_both(
    stored: StoredFormat, form: str, hidden: int, intermediate: int, seed: int = 0
) -> Iterator[tuple[ExpertKernel, ReferenceKernel]]:
    rng = torch.Generator().manual_seed(seed)
    kernel = interpreted_kernel()([FORMS[form]], KernelSpec(torch.bfloat16, stored=stored))
    reference = ReferenceKernel([FORMS[form]], KernelSpec(torch.float64))
    for number in range(2):
        weights = stored_expert(stored, FORMS[form], hidden, intermediate, rng)
        kernel.load(0, number, weights)
        reference.load(0, number, weights)
    try:
        yield kernel, reference
    finally:
        kernel.close()


sizes = st.one_of(st.integers(8, 70), st.sampled_from([96, 128, 144, 200, 256, 300]))


@each_format
@settings(max_examples=4, deadline=None)
@given(data=st.data())
def test_equals_the_reference(stored: StoredFormat, data: st.DataObject) -> None:
    form = data.draw(st.sampled_from(["swiglu", "clamped", "relu_squared"]))
    hidden, intermediate = data.draw(sizes), data.draw(sizes)
    tokens = data.draw(st.sampled_from([0, 1, 2, 3, 8, 17, 64]))
    seed = data.draw(st.integers(0, 9))
    with load_both(stored, form, hidden, intermediate, seed) as (kernel, reference):
        assert relative_error(kernel, reference, *batch(tokens, hidden, seed)) < BOUND


@each_format
def test_more_than_one_group_and_a_last_one_that_is_shorter(stored: StoredFormat) -> None:
    with load_both(stored, "clamped", 300, 70) as (kernel, reference):
        one = batch(33, 300, 1)
        assert relative_error(kernel, reference, *one) < BOUND
        # With few tokens, tiles are small.
        out_TH = kernel(*one, 0)
        some = slice(5, 8)
        assert torch.equal(kernel(*(part[some] for part in one), 0), out_TH[some])


@each_format
def test_poison_stays_in_its_row(stored: StoredFormat) -> None:
    with load_both(stored, "swiglu", 130, 40) as (kernel, _):
        x_TH, ids_TK, scores_TK = batch(9, 130, 0)
        clean_TH = kernel(x_TH, ids_TK.abs(), scores_TK, 0)
        x_TH[4, 7] = float("nan")
        out_TH = kernel(x_TH, ids_TK.abs(), scores_TK, 0)
    others = torch.arange(9) != 4
    assert torch.equal(out_TH[others], clean_TH[others])
    assert bool(out_TH[4].isnan().all())


def test_every_code_of_fp8() -> None:
    """The result of one input of 1 and a weight is the weight: subnormals, too."""
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    down = QuantizedMatrix(FP8, 1, 1, codes[:, None], torch.ones(len(codes), 1))
    check_codes(StoredFormat(FP8, 0), 0x38, torch.ones(1, 1), down)


def test_every_code_and_scale_of_mxfp4() -> None:
    """Products that are normal float32; the interpreter has no smaller bfloat16."""
    exponents = torch.arange(2, 253, dtype=torch.uint8)
    codes = torch.arange(251, dtype=torch.uint8) % 16
    down = QuantizedMatrix(MXFP4, 1, 32, codes[:, None], exponents[:, None])
    check_codes(StoredFormat(MXFP4, 32), 2, torch.full((1, 1), 127).byte(), down)


def check_codes(stored: StoredFormat, one: int, scale: torch.Tensor, down: QuantizedMatrix) -> None:
    hidden = down.shape[0]
    group = stored.group or hidden
    code_bytes = -(-hidden * stored.format.bits // 8)
    up = QuantizedMatrix(
        stored.format,
        hidden,
        group,
        functional.pad(torch.tensor([[one]], dtype=torch.uint8), (0, code_bytes - 1)),
        scale.expand(1, -(-hidden // group)).contiguous(),
    )
    form = ExpertForm(False, False, functional.relu)
    kernel = interpreted_kernel()([form], KernelSpec(torch.bfloat16, stored=stored))
    kernel.load(0, 0, ExpertWeights(up, down))
    x_TH = torch.zeros(3, hidden)
    x_TH[:, 0] = 1
    out_TH = kernel(x_TH, torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1), 0)
    kernel.close()
    assert torch.equal(out_TH[1], down.dequantize()[:, 0])


@each_format
def test_packing_in_pieces(stored: StoredFormat, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = KernelSpec(torch.bfloat16, stored=stored)
    form = FORMS["clamped"]
    weights = stored_expert(stored, form, 300, 70, torch.Generator().manual_seed(0))
    kernel = interpreted_kernel()([form], spec)
    one = batch(3, 300, 0)[0], torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
    kernel.load(0, 0, weights)
    whole_TH = kernel(*one, 0)
    monkeypatch.setattr("expert_server.kernels.gpu.packing.PIECE_BYTES", 4096)
    pauses: list[None] = []
    kernel.load(0, 0, weights, lambda: pauses.append(None))
    assert torch.equal(kernel(*one, 0), whole_TH)
    assert len(pauses) > 6
    kernel.close()


@pytest.mark.parametrize(
    ("stored", "bits"),
    [(FORMATS[0], 8.25), (FORMATS[1], 8.1), (FORMATS[2], 4.25), (None, 16)],
    ids=str,
)
def test_memory_is_that_of_the_checkpoint(stored: StoredFormat | None, bits: float) -> None:
    """Bits per weight, scales included."""
    form = FORMS["swiglu"]
    kernel = interpreted_kernel()([form], KernelSpec(torch.bfloat16, stored=stored))
    if stored is None:
        weights = ExpertWeights(torch.ones(1024, 1024), torch.ones(1024, 512))
    else:
        weights = stored_expert(stored, form, 1024, 512, torch.Generator().manual_seed(0))
    kernel.load(0, 0, weights)
    assert bits - 0.1 <= kernel.bytes * 8 / (3 * 1024 * 512) <= bits
    kernel.close()


@each_format
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_scale_that_is_no_number(stored: StoredFormat, poison: float) -> None:
    kernel = interpreted_kernel()([FORMS["swiglu"]], KernelSpec(torch.bfloat16, stored=stored))
    weights = stored_expert(stored, FORMS["swiglu"], 256, 40, torch.Generator().manual_seed(0))
    assert isinstance(weights.up, QuantizedMatrix)
    weights.up.scales[33, -1] = 255 if stored.format is MXFP4 else poison
    with pytest.raises(CheckpointError, match="a scale is NaN or infinite"):
        kernel.load(0, 0, weights)
    assert not kernel.count
    kernel.close()


def test_a_matrix_of_another_format() -> None:
    form = FORMS["swiglu"]
    rng = torch.Generator().manual_seed(0)
    fp8, mxfp4 = (stored_expert(stored, form, 256, 256, rng) for stored in (FORMATS[0], FORMATS[2]))
    for stored, weights in (
        (FORMATS[0], mxfp4),
        (FORMATS[1], fp8),
        (FORMATS[2], fp8),
        (None, fp8),
        (FORMATS[0], fp8.copy(torch.bfloat16)),
    ):
        kernel = interpreted_kernel()([form], KernelSpec(torch.bfloat16, stored=stored))
        with pytest.raises(CheckpointError, match="quantise all routed experts alike"):
            kernel.load(0, 0, weights)
        kernel.close()


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (KernelSpec(torch.float64), "supports float32 and bfloat16"),
        (KernelSpec(torch.bfloat16, Quantization.INT8), "does not quantise to int8"),
        (KernelSpec(torch.bfloat16, stored=StoredFormat(INT4, 128)), "supports fp8 and mxfp4"),
        (KernelSpec(torch.bfloat16, stored=StoredFormat(INT8, 0)), "supports fp8 and mxfp4"),
        (KernelSpec(torch.bfloat16, stored=StoredFormat(FP8, 64)), "groups of multiples of 128"),
        (KernelSpec(torch.bfloat16, stored=StoredFormat(MXFP4, 64)), "groups of 32"),
        (KernelSpec(torch.float32, stored=FORMATS[0]), "in bfloat16 models only"),
    ],
    ids=str,
)
def test_weights_that_it_lacks(spec: KernelSpec, why: str) -> None:
    with pytest.raises(UnsupportedError, match=why):
        interpreted_kernel()([FORMS["swiglu"]], spec)


def test_an_activation_that_it_lacks() -> None:
    form: Any = replace(FORMS["relu"], activate=torch.atan)
    with pytest.raises(UnsupportedError, match="does not know the model's activation"):
        interpreted_kernel()([form], KernelSpec(torch.float32))
