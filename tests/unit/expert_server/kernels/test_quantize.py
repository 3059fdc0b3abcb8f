"""Quantisation: codes in range, errors within bounds, layouts kept, NaN refused."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from eaas.checkpoint.quantized import QuantizedMatrix
from eaas.errors import CheckpointError
from expert_layers import swiglu
from expert_server.kernels import KernelSpec, Quantization, ReferenceKernel
from expert_server.kernels.quantize import GROUP, fake_quantize, quantization_error, quantize
from expert_server.weights.weights import ExpertForm, ExpertWeights

HIDDEN, INTERMEDIATE = 256, 192
LARGEST = {Quantization.INT8: (-127, 127), Quantization.INT4: (-8, 7)}
both = pytest.mark.parametrize("quantization", [Quantization.INT8, Quantization.INT4])


def form(is_transposed: bool = False) -> ExpertForm:
    return ExpertForm(has_gate=True, is_transposed=is_transposed, activate=swiglu)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def expert(dtype: torch.dtype = torch.float32, is_transposed: bool = False) -> ExpertWeights:
    up, down = (
        gaussian(2 * INTERMEDIATE, HIDDEN).to(dtype),
        gaussian(HIDDEN, INTERMEDIATE, seed=1).to(dtype),
    )
    if is_transposed:
        up, down = up.t().contiguous(), down.t().contiguous()
    return ExpertWeights(
        up, down, gaussian(2 * INTERMEDIATE, seed=2).to(dtype), gaussian(HIDDEN).to(dtype)
    )


def signed_codes(matrix: QuantizedMatrix) -> torch.Tensor:
    return matrix.values() - matrix.format.zero


def by_group(matrix_NK: torch.Tensor) -> torch.Tensor:
    """(N, groups, 128), filled up with zeros."""
    rows, inputs = matrix_NK.shape
    return functional.pad(matrix_NK, (0, -inputs % GROUP)).view(rows, -1, GROUP)


@both
@given(data=st.data())
def test_codes_are_in_range_and_no_weight_is_far_off(quantization, data) -> None:
    rows, inputs = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 400))
    w_NK = gaussian(rows, inputs, seed=data.draw(st.integers(0, 99)))
    # Rows from zero to near the ends of float32's range.
    w_NK *= torch.tensor(
        data.draw(st.lists(st.sampled_from([0, 1e-30, 1, 1e30]), min_size=rows, max_size=rows))
    ).view(-1, 1)
    w_NK[:, data.draw(st.integers(0, inputs - 1))] *= data.draw(st.sampled_from([0.0, 1.0, 50.0]))

    matrix = quantize(w_NK, quantization)

    low, high = LARGEST[quantization]
    groups = 1 if quantization is Quantization.INT8 else -(-inputs // GROUP)
    codes_NK = signed_codes(matrix)
    assert matrix.format.name == quantization
    assert matrix.shape == codes_NK.shape == w_NK.shape
    assert matrix.codes.dtype == torch.uint8
    assert matrix.scales.shape == (rows, groups)
    assert bool(((low <= codes_NK) & (codes_NK <= high)).all())
    step = matrix.scales.repeat_interleave(inputs if groups == 1 else GROUP, dim=1)[:, :inputs]
    off = (matrix.dequantize() - w_NK).abs()
    if quantization is Quantization.INT8:
        assert bool((off <= step * 0.5001).all())
    else:  # the last least squares moves the grid a little under the codes
        is_inside = (codes_NK > low) & (codes_NK < high)
        assert bool((off <= step.abs())[is_inside].all())


@given(data=st.data())
def test_int4_is_never_worse_than_the_largest_weight_over_8(data: st.DataObject) -> None:
    shape = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 300))
    w_NK = gaussian(*shape, seed=data.draw(st.integers(0, 99))) ** data.draw(
        st.sampled_from([1, 3])
    )
    plain = by_group(w_NK)
    unit = plain.gather(2, plain.abs().argmax(2, keepdim=True)) / -8
    plain_error = (plain - (plain / unit).round().clamp(-8, 7) * unit).square().sum(2)
    error = by_group(w_NK - quantize(w_NK, Quantization.INT4).dequantize()).square().sum(2)
    assert bool((error <= plain_error * 1.0001 + 1e-9).all())


@pytest.mark.parametrize("value", [-8.0, 7.0, -1.0, 3.5, 0.0])
def test_int4_of_a_single_weight_is_exact(value: float) -> None:
    assert quantize(torch.tensor([[value]]), Quantization.INT4).dequantize().item() == value


@both
def test_representable_weights_are_exact(quantization: Quantization) -> None:
    low, high = LARGEST[quantization]
    codes = torch.randint(low, high + 1, (5, 300), generator=torch.Generator().manual_seed(0))
    codes[:, ::GROUP] = low  # each group's largest
    w_NK = codes * 0.25
    torch.testing.assert_close(quantize(w_NK, quantization).dequantize(), w_NK)


@both
def test_zeros_stay_zeros(quantization: Quantization) -> None:
    matrix = quantize(torch.zeros(3, 200), quantization)
    assert not signed_codes(matrix).any()
    assert not matrix.scales.any()
    assert torch.equal(matrix.dequantize(), torch.zeros(3, 200))


@both
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_poisoned_weights_are_refused(quantization: Quantization, poison: float) -> None:
    w_NK = gaussian(4, 300)
    w_NK[2, 299] = poison
    with pytest.raises(CheckpointError, match=f"which {quantization} cannot hold"):
        quantize(w_NK, quantization)


@both
def test_blocks_do_not_change_the_result(quantization: Quantization) -> None:
    w_NK = gaussian(2500, 130)  # more than one block
    whole = quantize(w_NK, quantization)
    for row in (0, 1999, 2017, 2499):
        one = quantize(w_NK[row : row + 1], quantization)
        assert torch.equal(one.codes[0], whole.codes[row])
        assert torch.equal(one.scales[0], whole.scales[row])


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_fake_quantised_weights_keep_layout_and_biases(quantization, dtype) -> None:
    plain, turned = expert(dtype), expert(dtype, is_transposed=True)
    left = fake_quantize(plain, form(), quantization)
    left_turned = fake_quantize(turned, form(is_transposed=True), quantization)
    for name in ("up", "down"):
        weight, other = getattr(left, name), getattr(left_turned, name)
        assert weight.dtype == dtype
        assert other.shape == getattr(turned, name).shape
        assert other.is_contiguous()
        assert torch.equal(weight, other.t())
        assert not torch.equal(weight, getattr(plain, name))
    assert left.up_bias is plain.up_bias
    assert left.down_bias is plain.down_bias


@both
def test_the_error_is_that_of_the_reference_kernel(quantization: Quantization) -> None:
    """By another path: scores, ids and weights in float64."""
    weights, rows = expert(torch.bfloat16, is_transposed=True), 64
    error = quantization_error(weights, form(is_transposed=True), quantization)
    x_TH = gaussian(rows, HIDDEN)
    ids_T1, scores_T1 = torch.zeros(rows, 1, dtype=torch.int32), torch.ones(rows, 1)
    out = {}
    for kept in (Quantization.NONE, quantization):
        kernel = ReferenceKernel([form(is_transposed=True)], KernelSpec(torch.float64, kept))
        kernel.load(0, 0, weights)
        out[kept] = kernel(x_TH, ids_T1, scores_T1, 0)
    exact = out[Quantization.NONE]
    assert error == pytest.approx(
        float((out[quantization] - exact).norm() / exact.norm()), rel=1e-3
    )


def test_the_reference_kernel_rounds_quantised_weights() -> None:
    kernel = ReferenceKernel([form()], KernelSpec(torch.bfloat16, Quantization.INT8))
    weights = expert()
    kept = kernel.pack(weights, form(), pause=lambda: None)
    left = fake_quantize(weights, form(), Quantization.INT8)
    assert kept.up.dtype == torch.bfloat16
    assert torch.equal(kept.up, left.up.bfloat16())


@both
@pytest.mark.parametrize("outliers", [1.0, 100.0])
def test_errors_on_gaussian_weights_are_within_their_bounds(quantization, outliers) -> None:
    """int8 stays under 2 %; strong output channels cost nothing."""
    weights = ExpertWeights(gaussian(1536, 2048), gaussian(2048, 768, seed=1))
    weights.up[::100] *= outliers
    weights.down[::100] *= outliers
    error = quantization_error(weights, form(), quantization)
    low, high = {Quantization.INT8: (0.005, 0.02), Quantization.INT4: (0.08, 0.16)}[quantization]
    assert low < error < high


@both
def test_an_expert_of_zeros_has_no_error(quantization: Quantization) -> None:
    weights = ExpertWeights(torch.zeros(8, 16), torch.zeros(16, 4))
    assert quantization_error(weights, form(), quantization) == 0
