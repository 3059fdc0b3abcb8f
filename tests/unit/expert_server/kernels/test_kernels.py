"""Every kernel against the reference in float64, on generated shapes and batches."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_layers import BOUND, FORMS, batch, check_unloading, expert, relative_error
from expert_server.kernels import ExpertKernel, KernelSpec, ReferenceKernel
from expert_server.kernels.kernel import Quantization
from expert_server.kernels.native import NativeKernel, available_isas
from expert_server.weights.weights import ExpertForm, ExpertWeights

# Compared with the same weights: activations of 15 bits.
QUANTIZED_BOUND = 5e-4


@dataclass(frozen=True)
class Candidate:
    """A kernel to be tested: the compiled one with one of its instruction sets, or the reference."""

    dtype: torch.dtype
    isa: str = ""
    quantization: Quantization = Quantization.NONE

    def __str__(self) -> str:
        weights = self.quantization if self.is_quantized else str(self.dtype)[6:]
        return f"{weights}-{self.isa or 'reference'}"

    @property
    def is_quantized(self) -> bool:
        return self.quantization is not Quantization.NONE

    @property
    def bound(self) -> float:
        return QUANTIZED_BOUND if self.is_quantized else BOUND[self.dtype]

    def create(self, form: ExpertForm, threads: int) -> ExpertKernel:
        spec = KernelSpec(self.dtype, self.quantization, threads)
        return NativeKernel([form], spec, self.isa) if self.isa else ReferenceKernel([form], spec)


def candidates() -> Iterator[Candidate]:
    for quantization in (Quantization.INT8, Quantization.INT4):
        for isa in available_isas(KernelSpec(torch.float32, quantization)):
            yield Candidate(torch.float32, isa, quantization)
    for dtype in BOUND:
        for isa in available_isas(KernelSpec(dtype)):
            yield Candidate(dtype, isa)
        yield Candidate(dtype)


each_kernel = pytest.mark.parametrize("candidate", list(candidates()), ids=str)
each_native = pytest.mark.parametrize(
    "candidate", [candidate for candidate in candidates() if candidate.isa], ids=str
)
each_quantized = pytest.mark.parametrize(
    "candidate", [candidate for candidate in candidates() if candidate.is_quantized], ids=str
)


@dataclass
class Layer:
    """The same experts in a kernel and in the reference in float64."""

    kernel: ExpertKernel
    reference: ReferenceKernel
    weights: list[ExpertWeights]

    def error(self, x_TH: torch.Tensor, ids_TK: torch.Tensor, scores_TK: torch.Tensor) -> float:
        """Relative, of the whole batch (`relative_error`)."""
        return relative_error(self.kernel, self.reference, x_TH, ids_TK, scores_TK)


def layer(
    candidate: Candidate, form: ExpertForm, hidden: int, intermediate: int, experts: int, seed: int
) -> Layer:
    rng = torch.Generator().manual_seed(seed)
    kernel = candidate.create(form, threads=1 + seed % 3)
    reference = ReferenceKernel([form], KernelSpec(torch.float64, candidate.quantization))
    weights = [expert(form, hidden, intermediate, candidate.dtype, rng) for _ in range(experts)]
    for number, one in enumerate(weights):
        kernel.load(0, number, one)
        reference.load(0, number, one)
    return Layer(kernel, reference, weights)


# With fewer than 8 numbers, bfloat16's rounding may reach its bound; see `test_tiny_experts`.
sizes = st.one_of(st.integers(8, 40), st.sampled_from([48, 64, 96, 130]))


@each_kernel
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_equals_the_reference(candidate: Candidate, data: st.DataObject) -> None:
    """Odd sizes, no tokens, ids of -1, an expert twice in a token, scores of 0."""
    form = FORMS[data.draw(st.sampled_from(sorted(FORMS)))]
    hidden, intermediate = data.draw(sizes), data.draw(sizes)
    experts, top_k = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    tokens = data.draw(st.one_of(st.integers(0, 8), st.sampled_from([17, 33, 70])))
    ids = data.draw(
        st.lists(st.integers(-1, experts - 1), min_size=tokens * top_k, max_size=tokens * top_k)
    )
    seed = data.draw(st.integers(0, 99))
    both = layer(candidate, form, hidden, intermediate, experts, seed)
    try:
        error = both.error(*batch(tokens, hidden, ids, top_k, candidate.dtype, seed))
    finally:
        both.kernel.close()
    assert error < candidate.bound


@each_kernel
@pytest.mark.parametrize(("hidden", "intermediate"), [(1, 1), (1, 40), (33, 1), (3, 2)])
def test_tiny_experts(candidate: Candidate, hidden: int, intermediate: int) -> None:
    both = layer(candidate, FORMS["swiglu"], hidden, intermediate, 2, 0)
    ids = [0, 1, 1, -1, 0, 0]
    assert both.error(*batch(3, hidden, ids, 2, candidate.dtype, 0)) < 3 * candidate.bound
    both.kernel.close()


@each_kernel
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 6, 7, 16, 17, 32, 33, 127, 129, 300])
def test_all_tokens_to_one_expert(candidate: Candidate, rows: int) -> None:
    """One expert has all tokens, the others none: each edge of a block of rows."""
    both = layer(candidate, FORMS["swiglu"], 96, 80, 3, rows)
    assert both.error(*batch(rows, 96, [1] * rows, 1, candidate.dtype, rows)) < candidate.bound
    both.kernel.close()


@each_kernel
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_poison_stays_in_its_row(candidate: Candidate, data: st.DataObject) -> None:
    tokens = data.draw(st.integers(1, 40))
    row = data.draw(st.integers(0, tokens - 1))
    poison = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    ids = data.draw(st.lists(st.integers(-1, 3), min_size=tokens * 2, max_size=tokens * 2))
    form = FORMS[data.draw(st.sampled_from(["swiglu", "clamped", "gelu"]))]
    both = layer(candidate, form, 40, 24, 4, tokens)
    x_TH, ids_TK, scores_TK = batch(tokens, 40, ids, 2, candidate.dtype, tokens)
    scores_TK += 0.5
    clean_TH = both.kernel(x_TH, ids_TK, scores_TK, 0).clone()
    x_TH[row] = poison
    out_TH = both.kernel(x_TH, ids_TK, scores_TK, 0).clone()
    again_TH = both.kernel(x_TH.where(x_TH.isfinite(), 0), ids_TK, scores_TK, 0)
    both.kernel.close()
    others = torch.arange(tokens) != row
    assert torch.equal(out_TH[others], clean_TH[others])
    # It does not stay in memory that the next call uses, either.
    assert torch.equal(again_TH[others], clean_TH[others])
    assert bool(out_TH[row].isfinite().all()) is not bool((ids_TK[row] >= 0).any())
    assert bool(again_TH.isfinite().all())


@each_kernel
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a_token_alone_and_in_a_batch(candidate: Candidate, data: st.DataObject) -> None:
    """Bit for bit for the compiled kernel and the order of its batch; else within rounding."""
    tokens = data.draw(st.integers(1, 60))
    ids = data.draw(st.lists(st.integers(-1, 3), min_size=tokens * 3, max_size=tokens * 3))
    both = layer(candidate, FORMS["swiglu"], 130, 70, 4, tokens)
    x_TH, ids_TK, scores_TK = batch(tokens, 130, ids, 3, candidate.dtype, tokens)
    out_TH = both.kernel(x_TH, ids_TK, scores_TK, 0).clone()
    token = data.draw(st.integers(0, tokens - 1))
    one = slice(token, token + 1)
    alone_1H = both.kernel(x_TH[one], ids_TK[one], scores_TK[one], 0).clone()
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(tokens))
    shuffled_TH = both.kernel(x_TH[order], ids_TK[order], scores_TK[order], 0).clone()
    both.kernel.close()
    if candidate.isa:
        assert torch.equal(alone_1H, out_TH[one])
        assert torch.equal(shuffled_TH, out_TH[order])
    bound = candidate.bound
    assert (alone_1H - out_TH[one]).norm() <= bound * out_TH[one].norm()
    assert (shuffled_TH - out_TH[order]).norm() <= bound * out_TH.norm()


@each_native
@pytest.mark.parametrize(
    ("x_size", "weight_size"),
    [(1e-18, 1e-18), (1e-19, 1e-19), (1e-20, 1e-20), (1e-30, 1e-30), (1e-39, 1e10)],
)
def test_a_row_alone_and_in_a_batch_about_the_least_normal_number(
    candidate: Candidate, x_size: float, weight_size: float
) -> None:
    """The least normal float32 is 1e-38. Below it, few rows and many must round alike, or both to zero."""
    both = layer(candidate, FORMS["gelu"], 96, 80, 1, 0)
    up, down = both.weights[0].up, both.weights[0].down
    both.kernel.load(0, 0, ExpertWeights(up * weight_size, down))
    both.kernel.load(0, 1, ExpertWeights(up, down * weight_size))
    for number in range(2):
        x_TH, ids_TK, _ = batch(20, 96, [number] * 20, 1, candidate.dtype, 0)
        one = x_TH * x_size, ids_TK, torch.ones(20, 1)
        out_TH = both.kernel(*one, 0).clone()
        assert bool(out_TH.isfinite().all())
        for rows in (1, 2, 3, 4, 8):
            for first in range(0, 20, rows):
                some = slice(first, first + rows)
                few_RH = both.kernel(one[0][some], one[1][some], one[2][some], 0)
                assert torch.equal(few_RH, out_TH[some])
    both.kernel.close()


@each_kernel
@pytest.mark.parametrize("name", ["swiglu", "clamped"])
def test_a_very_negative_gate_gives_zero(candidate: Candidate, name: str) -> None:
    """gate * sigmoid(gate) goes to 0 for very negative gates, and must not grow again."""
    form = FORMS[name]
    gates = torch.tensor([-100.0, -1e4, -1e30, 1.0])
    gate_and_up = torch.stack([gates, torch.ones(4)], dim=1 if form.is_transposed else 0).flatten()
    up = torch.zeros(4, 8) if form.is_transposed else torch.zeros(8, 4)
    weights = ExpertWeights(up, torch.eye(4), gate_and_up, torch.zeros(4)).to(candidate.dtype)
    one = torch.ones(1, 4), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
    kernel = candidate.create(form, threads=1)
    reference = ReferenceKernel([form], KernelSpec(torch.float64, candidate.quantization))
    for each in (kernel, reference):
        each.load(0, 0, weights)
    out_H, right_H = kernel(*one, 0)[0], reference(*one, 0)[0]
    kernel.close()
    assert bool(((out_H - right_H).abs() <= right_H.abs() * candidate.bound + 1e-30).all())


@each_kernel
@pytest.mark.parametrize("wrong", [3, 99, -2])
def test_an_expert_that_is_not_held(candidate: Candidate, wrong: int) -> None:
    both = layer(candidate, FORMS["swiglu"], 32, 16, 3, 0)
    x_TH, ids_TK, scores_TK = batch(2, 32, [0, 1, 2, wrong], 2, candidate.dtype, 0)
    with pytest.raises(LookupError, match=f"layer 0: expert {wrong} is not held"):
        both.kernel(x_TH, ids_TK, scores_TK, 0)
    with pytest.raises(LookupError, match="layer 7"):
        both.kernel(x_TH, ids_TK, scores_TK, 7)
    both.kernel.close()


@each_kernel
@pytest.mark.parametrize("wrong", [2**32, 2**32 - 1])
def test_an_id_beyond_32_bits_is_not_truncated(candidate: Candidate, wrong: int) -> None:
    """Truncated to 32 bits, these would be 0 and -1."""
    both = layer(candidate, FORMS["swiglu"], 32, 16, 1, 0)
    x_TH, _, scores_TK = batch(2, 32, [0] * 4, 2, candidate.dtype, 0)
    with pytest.raises(LookupError, match=f"layer 0: expert {wrong} is not held"):
        both.kernel(x_TH, torch.tensor([[0, 0], [0, wrong]]), scores_TK, 0)
    both.kernel.close()


@each_kernel
@pytest.mark.parametrize(
    ("x", "ids", "scores"),
    [
        ((5, 32), (1, 2), (1, 2)),
        ((1, 32), (5, 2), (5, 2)),
        ((5, 32), (5, 2), (5, 1)),
        ((5, 32), (5, 2), (4, 2)),
        ((5, 32), (5, 2), (5, 3)),
        ((5, 32), (5, 2), (10,)),
        ((5, 32), (10,), (10,)),
    ],
)
def test_shapes_that_do_not_match(
    candidate: Candidate, x: tuple[int, ...], ids: tuple[int, ...], scores: tuple[int, ...]
) -> None:
    both = layer(candidate, FORMS["swiglu"], 32, 16, 1, 0)
    one = torch.ones(x), torch.zeros(ids, dtype=torch.int32), torch.ones(scores)
    shapes = re.escape(f"x {x}, ids {ids}, scores {scores}: ")
    with pytest.raises(ValueError, match=f"^{shapes}"):
        both.kernel(*one, 0)
    both.kernel.close()


@each_kernel
@pytest.mark.parametrize("hidden", [24, 40])
def test_another_hidden_size(candidate: Candidate, hidden: int) -> None:
    """The compiled kernel reads by address and must check by itself. Torch checks for others."""
    both = layer(candidate, FORMS["swiglu"], 32, 16, 1, 0)
    one = torch.ones(5, hidden), torch.zeros(5, 2, dtype=torch.int32), torch.ones(5, 2)
    with pytest.raises((ValueError, RuntimeError)):
        both.kernel(*one, 0)
    both.kernel.close()


@each_kernel
def test_load_and_unload(candidate: Candidate) -> None:
    both = layer(candidate, FORMS["swiglu"], 48, 32, 3, 0)
    check_unloading(both.kernel, both.weights, candidate.dtype)
    both.kernel.close()


@each_kernel
def test_load_and_unload_during_computation(candidate: Candidate) -> None:
    """Also for experts of the batch: the result is right or an error, never from other memory."""
    both = layer(candidate, FORMS["swiglu"], 256, 128, 3, 0)
    other = expert(FORMS["swiglu"], 256, 128, candidate.dtype, torch.Generator().manual_seed(9))
    one = batch(16, 256, [0, 1, 2, -1] * 8, 2, candidate.dtype, 0)
    right_TH = both.kernel(*one, 0).clone()
    stop = threading.Event()

    def churn() -> None:
        while not stop.is_set():
            both.kernel.unload(0, 1)
            both.kernel.load(0, 5, other)  # maybe to where expert 1 was
            both.kernel.unload(0, 5)
            both.kernel.load(0, 1, both.weights[1])
            stop.wait(0.002)

    thread = threading.Thread(target=churn)
    thread.start()
    answers = missing = 0
    end = time.monotonic() + 0.2
    try:
        while time.monotonic() < end or not (answers and missing):
            try:
                error = (both.kernel(*one, 0) - right_TH).norm() / right_TH.norm()
            except LookupError:
                missing += 1
                time.sleep(0.001)
            else:
                assert error < candidate.bound
                answers += 1
    finally:
        stop.set()
        thread.join()
        both.kernel.close()


@each_kernel
def test_the_source_may_be_freed(candidate: Candidate) -> None:
    both = layer(candidate, FORMS["clamped"], 48, 32, 1, 0)
    weights = expert(FORMS["clamped"], 48, 32, candidate.dtype, torch.Generator().manual_seed(5))
    both.kernel.load(0, 0, weights)
    one = batch(3, 48, [0, 0, 0], 1, candidate.dtype, 0)
    before_TH = both.kernel(*one, 0).clone()
    weights.up.zero_()
    weights.down.zero_()
    assert torch.equal(both.kernel(*one, 0), before_TH)
    both.kernel.close()


@each_kernel
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_float_dtype_as_input(candidate: Candidate, given: torch.dtype) -> None:
    both = layer(candidate, FORMS["swiglu"], 48, 32, 2, 0)
    x_TH, ids_TK, scores_TK = batch(4, 48, [0, 1, 1, 0], 1, torch.bfloat16, 0)
    wide_TK = ids_TK.to(torch.int64)
    out_TH = both.kernel(x_TH.to(given), wide_TK, scores_TK, 0).clone()
    # The experts' outputs are rounded to bfloat16 if the tokens are.
    alike = given if given is torch.bfloat16 else torch.float32
    assert torch.equal(out_TH, both.kernel(x_TH.to(alike), ids_TK, scores_TK, 0))
    both.kernel.close()


@each_kernel
@pytest.mark.parametrize("form", ["swiglu", "clamped"])
def test_division_of_the_experts_among_servers(candidate: Candidate, form: str) -> None:
    experts, tokens, top_k = 12, 64, 8
    both = layer(candidate, FORMS[form], 200, 72, experts, 0)
    draw = torch.Generator().manual_seed(0)
    x_TH = torch.randn(tokens, 200, generator=draw).bfloat16()
    ids_TK = torch.stack([torch.randperm(experts, generator=draw)[:top_k] for _ in range(tokens)])
    scores_TK = torch.rand(tokens, top_k, generator=draw).softmax(1)
    whole_TH = both.kernel(x_TH, ids_TK.int(), scores_TK, 0).clone()
    for _ in range(5):
        server_E = torch.randint(3, (experts,), generator=draw)
        sum_TH = torch.zeros_like(whole_TH)
        for server in range(3):
            own_TK = ids_TK.where(server_E[ids_TK] == server, -1).int()
            sum_TH += both.kernel(x_TH, own_TK, scores_TK, 0)
        assert torch.equal(sum_TH.bfloat16(), whole_TH.bfloat16())
    both.kernel.close()


@each_quantized
@pytest.mark.parametrize(("hidden", "intermediate"), [(2100, 72), (80, 1100), (1024, 128)])
def test_more_inputs_than_a_segment(candidate: Candidate, hidden: int, intermediate: int) -> None:
    both = layer(candidate, FORMS["clamped"], hidden, intermediate, 2, 0)
    rows = 20
    one = batch(rows, hidden, [0, 1] * (rows // 2), 1, candidate.dtype, 0)
    assert both.error(*one) < candidate.bound
    out_TH = both.kernel(*one, 0).clone()
    for row in range(rows):
        alone_1H = both.kernel(*(tensor[row : row + 1] for tensor in one), 0)
        assert torch.equal(alone_1H[0], out_TH[row])
    both.kernel.close()


@each_quantized
@pytest.mark.parametrize("size", [0.0, 1e-12, 1e-3, 1e15])
def test_activations_of_any_size(candidate: Candidate, size: float) -> None:
    both = layer(candidate, FORMS["swiglu"], 100, 60, 2, 0)
    x_TH, ids_TK, scores_TK = batch(4, 100, [0, 1, 1, 0], 1, candidate.dtype, 0)
    assert both.error(x_TH * size, ids_TK, scores_TK + 0.1) < candidate.bound
    both.kernel.close()


@each_quantized
def test_an_outlier_among_the_activations(candidate: Candidate) -> None:
    both = layer(candidate, FORMS["swiglu"], 256, 64, 2, 0)
    x_TH, ids_TK, scores_TK = batch(4, 256, [0, 1, 1, 0], 1, candidate.dtype, 0)
    x_TH[:, 7] *= 300
    assert both.error(x_TH, ids_TK, scores_TK + 0.1) < candidate.bound
    both.kernel.close()
