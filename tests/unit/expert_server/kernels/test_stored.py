"""Weights as quantised checkpoints store them, and as other packages do; `test_kernels.py` computes."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from eaas.checkpoint import Checkpoint
from eaas.checkpoint.formats.registry import GROUP
from eaas.checkpoint.quantized import FP8, INT4, INT8, MXFP4, QuantizedMatrix
from eaas.errors import CheckpointError, UnsupportedModelError
from expert_layers import BOUND, FORMATS, FORMS, STORED, TRITON, Candidate, Layer, layer, over
from expert_server.kernels import KernelSpec, Quantization, ReferenceKernel, StoredFormat
from expert_server.kernels.choose import ExpertSizes, choose_kernel
from expert_server.kernels.kernel import UnsupportedError
from expert_server.kernels.spec import spec_of
from expert_server.weights.reader import ExpertReader
from expert_server.weights.weights import ExpertForm, ExpertWeights
from installed_package import install
from quantized_checkpoint import Packed, Scheme, quantized_copy

AUTO = [Candidate(KernelSpec(torch.bfloat16, stored=stored), "") for stored in FORMATS]
each_format = over([*AUTO, *TRITON[2:]])


@over([one for one in (*STORED, *TRITON) if one.spec.stored in (FORMATS[1], FORMATS[2])])
def test_every_code(candidate: Candidate) -> None:
    """The result of one input of 1 and a weight is the weight, subnormal codes and all scales, too.

    Where a value of mxfp4 is not normal in float32, it is nearly nothing.
    """
    assert candidate.spec.stored is not None
    form = candidate.spec.stored.format
    if form is FP8:
        codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F]).byte()
        down = QuantizedMatrix(FP8, 1, 1, codes[:, None], torch.rand(len(codes), 1))
        one, scale = 0x38, torch.ones(1, 1)
    else:
        # Interpreted code takes long: each code and each scale, but not all pairs of them.
        step = 17 if candidate.isa == "triton" else 1
        codes = torch.arange(16, dtype=torch.uint8).repeat(253)[::step]
        scales = torch.arange(253, dtype=torch.uint8).repeat_interleave(16)[::step, None]
        down = QuantizedMatrix(MXFP4, 1, 32, codes[:, None], scales)
        one, scale = 2, torch.full((1, 1), 127).byte()
    hidden, group = len(codes), 32 if form is MXFP4 else len(codes)
    first = functional.pad(torch.tensor([[one]]).byte(), (0, -(-hidden * form.bits // 8) - 1))
    up = QuantizedMatrix(form, hidden, group, first, scale.expand(1, -(-hidden // group)).clone())
    wanted, tiny = down.dequantize()[:, 0], torch.finfo(torch.float32).tiny
    is_normal = (wanted.abs() >= tiny) & (down.scales[:, 0] > 0) | (wanted == 0)
    with layer(candidate, ExpertForm(False, False, functional.relu), 1, 1, 0) as both:
        both.kernel.load(0, 0, ExpertWeights(up, down))
        for tokens in (3,) if candidate.isa == "triton" else (1, 3, 16, 40):
            x_TH = torch.zeros(tokens, hidden)
            x_TH[:, 0] = 1
            ids_TK = torch.zeros(tokens, 1, dtype=torch.int32)
            out_H = both.kernel(x_TH, ids_TK, torch.ones(tokens, 1), 0)[-1]
            assert torch.equal(out_H[is_normal], wanted[is_normal]), tokens
            assert not (out_H[~is_normal].abs() > 6 * tiny).any()


@over(AUTO)
def test_a_kernel_of_float32_takes_exact_rows(candidate: Candidate) -> None:
    exact = Candidate(replace(candidate.spec, dtype=torch.float32), "")
    with layer(exact, "swiglu", 136, 48, 1) as both:
        one = exact.batch(5, 136, [0, -1] * 5, 2)
        assert both.error(*one) < BOUND[torch.float32]


@each_format
def test_packing_in_pieces(candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    with layer(candidate, "clamped", 300, 70, 1) as both:
        one = candidate.batch(3, 300, [0, 0, 0], 1)
        whole_TH = both.kernel(*one, 0).clone()
        module = "gpu.packing" if candidate.isa == "triton" else "panels"
        monkeypatch.setattr(f"expert_server.kernels.{module}.PIECE_BYTES", 4096)
        pauses: list[None] = []
        both.kernel.load(0, 0, both.weights[0], lambda: pauses.append(None))
        assert torch.equal(both.kernel(*one, 0), whole_TH)
        assert len(pauses) > 6


@each_format
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_scale_that_is_no_number(candidate: Candidate, poison: float) -> None:
    assert candidate.spec.stored is not None
    with layer(candidate, "swiglu", 256, 40, 1) as both:
        both.kernel.unload(0, 0)
        up = both.weights[0].up
        assert isinstance(up, QuantizedMatrix)
        up.scales[33, -1] = 255 if candidate.spec.stored.format is MXFP4 else poison
        with pytest.raises(CheckpointError, match="a scale is NaN or infinite"):
            both.kernel.load(0, 0, both.weights[0])
        assert not both.kernel.count


@pytest.mark.parametrize("exponent", [253, 254])
def test_a_scale_of_mxfp4_that_tiles_cannot_hold(exponent: int) -> None:
    with layer(AUTO[2], "swiglu", 256, 64, 1) as both:
        down = both.weights[0].down
        assert isinstance(down, QuantizedMatrix)
        down.scales[5, 1] = exponent
        with pytest.raises(CheckpointError, match="a scale is NaN or infinite"):
            both.kernel.load(0, 0, both.weights[0])


@pytest.mark.parametrize(
    ("isa", "wanted", "given"),
    [
        ("", StoredFormat(INT4, 128), StoredFormat(INT4, 64)),
        ("", StoredFormat(INT4, 128), StoredFormat(INT8, 128)),
        ("", StoredFormat(INT8, 128), StoredFormat(INT8, 128, has_zeros=True)),
        *(
            (isa, wanted, given)
            for isa in ("", "triton")
            for wanted, given in (
                (StoredFormat(FP8, 128), None),
                (None, StoredFormat(FP8, 0)),
                (StoredFormat(FP8, 128), StoredFormat(MXFP4, 32)),
                (StoredFormat(FP8, 0), StoredFormat(FP8, 128)),
                (StoredFormat(MXFP4, 32), StoredFormat(FP8, 128)),
            )
        ),
    ],
    ids=str,
)
def test_a_matrix_of_another_format(isa, wanted, given) -> None:
    kernel, other = (
        Candidate(KernelSpec(torch.bfloat16, stored=stored), isa) for stored in (wanted, given)
    )
    weights = other.weights(FORMS["swiglu"], 256, 256, torch.Generator().manual_seed(0))
    with layer(kernel, "swiglu", 256, 256, 0) as both:
        with pytest.raises(CheckpointError, match="quantise all routed experts alike") as caught:
            both.kernel.load(0, 0, weights)
        if wanted and given and not isa:
            assert str(wanted) in str(caught.value)
            assert str(given) in str(caught.value)


@pytest.mark.parametrize("isa", ["", "triton"])
def test_a_matrix_with_a_scale_per_channel_among_groups(isa: str) -> None:
    kernel, other = (
        Candidate(KernelSpec(torch.bfloat16, stored=StoredFormat(FP8, group)), isa)
        for group in (128, 0)
    )
    weights = other.weights(FORMS["swiglu"], 300, 130, torch.Generator().manual_seed(0))
    with layer(kernel, "swiglu", 300, 130, 0) as both:
        both.kernel.load(0, 0, weights)
        both.reference.load(0, 0, weights)
        assert both.error(*kernel.batch(3, 300, [0, 0, 0], 1)) < BOUND[torch.bfloat16]


@pytest.mark.parametrize(
    ("isa", "spec", "why"),
    [
        ("", (INT4, 48), "int4 .groups of 48.*multiples of 32"),
        ("", (INT8, 48), "int8 .groups of 48.*multiples of 32"),
        ("", (INT8, 48, True), "int8 .groups of 48.*multiples of 32"),
        ("", (FP8, 64), "fp8 .groups of 64.*multiples of 128"),
        ("", (FP8, 128, True), "no zero points"),
        ("triton", (INT4, 128), "supports fp8 and mxfp4"),
        ("triton", (INT8, 0), "supports fp8 and mxfp4"),
        ("triton", (FP8, 64), "groups of multiples of 128"),
        ("triton", (MXFP4, 64), "groups of 32"),
        ("triton", KernelSpec(torch.float32, stored=FORMATS[0]), "in bfloat16 models only"),
        ("triton", KernelSpec(torch.float64), "supports float32 and bfloat16"),
        ("triton", KernelSpec(torch.bfloat16, Quantization.INT8), "does not quantise to int8"),
    ],
    ids=str,
)
def test_weights_that_a_kernel_lacks(isa: str, spec: KernelSpec | tuple, why: str) -> None:
    if isinstance(spec, tuple):
        spec = KernelSpec(torch.bfloat16, stored=StoredFormat(*spec))
    with pytest.raises(UnsupportedError, match=why), layer(Candidate(spec, isa), "swiglu", 8, 8, 0):
        pass


@over([Candidate(KernelSpec(torch.float32), isa) for isa in ("", "triton")])
def test_an_activation_that_a_kernel_lacks(candidate: Candidate) -> None:
    unknown = ExpertForm(False, False, torch.atan)
    with (
        pytest.raises(UnsupportedError, match="does not know the model's activation"),
        layer(candidate, unknown, 8, 8, 0),
    ):
        pass


def test_what_is_quantised_is_not_quantised_again() -> None:
    with pytest.raises(ValueError, match="cannot be quantised to int8"):
        KernelSpec(torch.bfloat16, Quantization.INT8, stored=FORMATS[0])


@pytest.mark.parametrize(
    ("isa", "stored", "least", "most"),
    [
        # Short scales take half of the memory; zero points need the longer ones.
        ("", StoredFormat(INT4, 32), 5.0, 5.0),
        ("", StoredFormat(INT4, 32, has_short_scales=True), 4.5, 4.5),
        ("", StoredFormat(INT4, 32, has_zeros=True, has_short_scales=True), 5.0, 5.0),
        ("triton", FORMATS[0], 8.15, 8.25),
        ("triton", FORMATS[1], 8.0, 8.1),
        ("triton", FORMATS[2], 4.15, 4.25),
        ("triton", None, 15.9, 16.0),
    ],
    ids=str,
)
def test_memory_is_that_of_the_checkpoint(isa, stored, least, most) -> None:
    """Bits per weight, scales included."""
    candidate = Candidate(KernelSpec(torch.bfloat16, stored=stored), isa)
    with layer(candidate, "swiglu", 1024, 512, 1) as both:
        assert least <= both.kernel.bytes * 8 / (3 * 1024 * 512) <= most


PAGE = (Path(__file__).parents[4] / "docs" / "models.md").read_text()
(SHOWN,) = re.findall(r"```python\n(.*?)```", PAGE.split("## Your own number format")[1], re.DOTALL)
NAME = "int8-groups"


def pack(weight_NK: torch.Tensor) -> Packed:
    scales_NG = torch.stack([part.abs().amax(1) / 127 for part in weight_NK.split(32, dim=1)], 1)
    by_input = scales_NG.repeat_interleave(32, 1)[:, : weight_NK.shape[1]]
    codes = (weight_NK / by_input).round().to(torch.int8)
    return Packed({"weight": codes, "weight_scale": scales_NG}, codes * by_input)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_package_adds_a_format(dtype, checkpoint, tmp_path, monkeypatch) -> None:
    copy, scheme = tmp_path / "copy", Scheme({"quant_method": NAME}, pack)
    plain = quantized_copy(checkpoint(), copy, scheme, dtype)
    with pytest.raises(UnsupportedModelError, match=f"{NAME}', which is not supported"):
        Checkpoint.open(copy)
    entries = {NAME: "matrices", "gone": "gone"}
    install(tmp_path, monkeypatch, GROUP, "int8_groups", entries, SHOWN)
    reader, exact = ExpertReader(Checkpoint.open(copy)), ExpertReader(Checkpoint.open(plain))
    assert str(reader.stored) == f"{NAME} (groups of 32)"
    spec = spec_of(reader, threads=1)
    # float32 holds all values of float16.
    assert spec.dtype is (torch.float32 if dtype is torch.float16 else dtype)
    kernel = choose_kernel(reader.forms, spec, ExpertSizes(64, 32, 8, 2)).kernel
    assert kernel.name == "native"
    both = Layer(kernel, ReferenceKernel(exact.forms, KernelSpec(torch.float64)), [])
    for read, to in ((reader, both.kernel), (exact, both.reference)):
        for expert, weights in read.read(0, range(8)):
            to.load(0, expert, weights)
    one = Candidate(spec, "").batch(9, 64, list(range(8)) * 2 + [3, 5], 2)
    assert both.error(*one) < BOUND[spec.dtype]
    assert kernel.bytes == 8 * 3 * 64 * 32 * spec.dtype.itemsize
    kernel.close()
    config = copy / "config.json"
    config.write_text(config.read_text().replace(NAME, "gone"))
    with pytest.raises(UnsupportedModelError, match="'gone': int8_groups:gone cannot be loaded"):
        Checkpoint.open(copy)
