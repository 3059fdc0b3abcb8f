"""Kernel `triton`, interpreted, against the reference in float64: the cases of `test_kernels.py`.

A call takes a tenth of a second and more, so there are fewer examples.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expert_layers import BOUND, FORMS, batch, check_unloading, expert, relative_error
from expert_server.kernels import ExpertKernel, KernelSpec, ReferenceKernel
from expert_server.weights.weights import ExpertForm, ExpertWeights
from interpreted_triton import interpreted_kernel, needs_triton, round_rows_alike

pytestmark = needs_triton
each_dtype = pytest.mark.parametrize("dtype", BOUND, ids=lambda dtype: str(dtype)[6:])


@dataclass
class Layer:
    """The same experts in the kernel and in the reference in float64."""

    kernel: ExpertKernel
    reference: ReferenceKernel
    weights: list[ExpertWeights]

    def error(self, *one: torch.Tensor) -> float:
        return relative_error(self.kernel, self.reference, *one)


@contextmanager
def layer(
    dtype: torch.dtype,
    form: str | ExpertForm,
    hidden: int,
    intermediate: int,
    experts: int,
    seed: int = 0,
) -> Iterator[Layer]:
    rng = torch.Generator().manual_seed(seed)
    form = FORMS[form] if isinstance(form, str) else form
    kernel = interpreted_kernel()([form], KernelSpec(dtype))
    reference = ReferenceKernel([form], KernelSpec(torch.float64))
    weights = [expert(form, hidden, intermediate, dtype, rng) for _ in range(experts)]
    for number, one in enumerate(weights):
        kernel.load(0, number, one)
        reference.load(0, number, one)
    try:
        yield Layer(kernel, reference, weights)
    finally:
        kernel.close()


sizes = st.one_of(st.integers(8, 40), st.sampled_from([48, 64, 96, 130]))


@each_dtype
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_equals_the_reference(dtype: torch.dtype, data: st.DataObject) -> None:
    """Odd sizes, no tokens, ids of -1, an expert twice in a token, scores of 0."""
    form = data.draw(st.sampled_from(sorted(FORMS)))
    hidden, intermediate = data.draw(sizes), data.draw(sizes)
    experts, top_k = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
    tokens = data.draw(st.one_of(st.integers(0, 8), st.sampled_from([17, 33, 70])))
    ids = data.draw(
        st.lists(st.integers(-1, experts - 1), min_size=tokens * top_k, max_size=tokens * top_k)
    )
    seed = data.draw(st.integers(0, 99))
    with layer(dtype, form, hidden, intermediate, experts, seed) as both:
        assert both.error(*batch(tokens, hidden, ids, top_k, dtype, seed)) < BOUND[dtype]


def interleaved(product: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(product[..., ::2]) * product[..., 1::2]


@each_dtype
@pytest.mark.parametrize("form", [*FORMS, "interleaved"])
def test_every_activation(dtype: torch.dtype, form: str) -> None:
    known = FORMS.get(form) or ExpertForm(True, True, interleaved)
    with layer(dtype, known, 96, 40, 2) as both:
        assert both.error(*batch(3, 96, [0, 1, 1, -1, 0, 1], 2, dtype, 0)) < BOUND[dtype]


@each_dtype
@pytest.mark.parametrize(("hidden", "intermediate"), [(1, 1), (1, 40), (33, 1), (3, 2)])
def test_tiny_experts(dtype: torch.dtype, hidden: int, intermediate: int) -> None:
    with layer(dtype, "swiglu", hidden, intermediate, 2) as both:
        one = batch(3, hidden, [0, 1, 1, -1, 0, 0], 2, dtype, 0)
        assert both.error(*one) < 3 * BOUND[dtype]


@each_dtype
@pytest.mark.parametrize("rows", [1, 16, 17, 33, 95, 96, 129])
def test_all_tokens_to_one_expert(dtype: torch.dtype, rows: int) -> None:
    """One expert has all tokens, the others none: each edge of a tile; from 96 rows on, tiles are large."""
    with layer(dtype, "swiglu", 96, 80, 3, rows) as both:
        assert both.error(*batch(rows, 96, [1] * rows, 1, dtype, rows)) < BOUND[dtype]


@each_dtype
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("form", ["swiglu", "clamped", "gelu"])
def test_poison_stays_in_its_row(dtype: torch.dtype, poison: float, form: str) -> None:
    with layer(dtype, form, 40, 24, 4) as both:
        x_TH, ids_TK, scores_TK = batch(5, 40, [0, 1, 1, 0, -1, 1, 3, 3, -1, -1], 2, dtype, 0)
        scores_TK += 0.5
        clean_TH = both.kernel(x_TH, ids_TK, scores_TK, 0).clone()
        x_TH[1] = x_TH[4] = poison
        out_TH = both.kernel(x_TH, ids_TK, scores_TK, 0)
    others = [0, 2, 3]
    assert torch.equal(out_TH[others], clean_TH[others])
    assert not bool(out_TH[1].isfinite().any())
    assert not bool(out_TH[4].any())


@each_dtype
@pytest.mark.parametrize("tokens", [5, 60])
def test_a_token_alone_and_in_a_batch(
    dtype: torch.dtype, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, as long as the tiles are the same."""
    round_rows_alike(monkeypatch)
    rng = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, 4, (tokens, 3), generator=rng)
    with layer(dtype, "swiglu", 70, 40, 4) as both:
        x_TH, ids_TK, scores_TK = batch(tokens, 70, ids.tolist(), 3, dtype, tokens)
        out_TH = both.kernel(x_TH, ids_TK, scores_TK, 0)
        one = slice(3, 4)
        alone_1H = both.kernel(x_TH[one], ids_TK[one], scores_TK[one], 0)
        order = torch.randperm(tokens, generator=rng)
        shuffled_TH = both.kernel(x_TH[order], ids_TK[order], scores_TK[order], 0)
    assert torch.equal(alone_1H, out_TH[one])
    assert torch.equal(shuffled_TH, out_TH[order])


@each_dtype
@pytest.mark.parametrize("name", ["swiglu", "clamped"])
def test_a_very_negative_gate_gives_zero(dtype: torch.dtype, name: str) -> None:
    form = FORMS[name]
    gates = torch.tensor([-100.0, -1e4, -1e30, 1.0])
    gate_and_up = torch.stack([gates, torch.ones(4)], dim=1 if form.is_transposed else 0).flatten()
    up = torch.zeros(4, 8) if form.is_transposed else torch.zeros(8, 4)
    weights = ExpertWeights(up, torch.eye(4), gate_and_up, torch.zeros(4)).to(dtype)
    one = torch.ones(1, 4), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
    with layer(dtype, name, 4, 4, 0) as both:
        for each in (both.kernel, both.reference):
            each.load(0, 0, weights)
        out_H, right_H = both.kernel(*one, 0)[0], both.reference(*one, 0)[0]
    assert bool(((out_H - right_H).abs() <= right_H.abs() * BOUND[dtype] + 1e-30).all())


def test_rounds_to_nearest_even_like_a_gpu() -> None:
    """Each result is one product of two bfloat16 numbers, exact in float32, and rounded once."""
    rng = torch.Generator().manual_seed(0)
    width = 64
    weights = torch.randn(width, generator=rng).bfloat16()
    # Products with a half, one, and one and a half of the last bit, too.
    weights[:4] = torch.tensor([1.0, 1.0078125, 1.5, 1.0234375])
    x_TH = torch.randn(8, width, generator=rng).bfloat16()
    x_TH[0] = 1.0078125
    with layer(torch.bfloat16, "relu", 1, 1, 0) as both:
        matrix = torch.diag(weights)
        both.kernel.load(0, 0, ExpertWeights(matrix.abs(), torch.eye(width).bfloat16()))
        ids = torch.zeros(8, 1, dtype=torch.int32)
        out_TH = both.kernel(x_TH, ids, torch.ones(8, 1), 0)
    right_TH = (x_TH.float() * weights.float().abs()).relu().bfloat16().float()
    assert torch.equal(out_TH, right_TH)


@each_dtype
@pytest.mark.parametrize("wrong", [3, 99, -2, 2**32, 2**32 - 1])
def test_an_expert_that_is_not_held(dtype: torch.dtype, wrong: int) -> None:
    with layer(dtype, "swiglu", 32, 16, 3) as both:
        ids_TK = torch.tensor([[0, 1], [2, wrong]])
        one = torch.ones(2, 32), ids_TK, torch.ones(2, 2)
        counts_LX = np.zeros((1, 1 + 8), np.int64)
        both.kernel.count_into(counts_LX)
        with pytest.raises(LookupError, match=f"layer 0: expert {wrong} is not held"):
            both.kernel(*one, 0)
        assert not counts_LX.any()
        with pytest.raises(LookupError, match="layer 7"):
            both.kernel(*one, 7)


@pytest.mark.parametrize(
    ("x", "ids", "scores"),
    [((5, 32), (1, 2), (1, 2)), ((5, 32), (5, 2), (5, 1)), ((5, 32), (10,), (10,))],
)
def test_shapes_that_do_not_match(
    x: tuple[int, ...], ids: tuple[int, ...], scores: tuple[int, ...]
) -> None:
    with layer(torch.float32, "swiglu", 32, 16, 1) as both:
        one = torch.ones(x), torch.zeros(ids, dtype=torch.int32), torch.ones(scores)
        shapes = re.escape(f"x {x}, ids {ids}, scores {scores}: ")
        with pytest.raises(ValueError, match=f"^{shapes}"):
            both.kernel(*one, 0)


@pytest.mark.parametrize("hidden", [24, 40])
def test_another_hidden_size(hidden: int) -> None:
    with layer(torch.float32, "swiglu", 32, 16, 1) as both:
        one = torch.ones(5, hidden), torch.zeros(5, 2, dtype=torch.int32), torch.ones(5, 2)
        with pytest.raises(ValueError, match="hidden size is 32"):
            both.kernel(*one, 0)


@each_dtype
def test_load_and_unload(dtype: torch.dtype) -> None:
    with layer(dtype, "swiglu", 48, 32, 3) as both:
        check_unloading(both.kernel, both.weights, dtype)


def test_load_and_unload_during_computation() -> None:
    """Also for experts of the batch: the result is right or an error, never from other memory."""
    with layer(torch.float32, "swiglu", 96, 64, 3) as both:
        other = expert(FORMS["swiglu"], 96, 64, torch.float32, torch.Generator().manual_seed(9))
        one = batch(4, 96, [0, 1, 2, -1] * 2, 2, torch.float32, 0)
        right_TH = both.kernel(*one, 0)
        stop = threading.Event()

        def churn() -> None:
            while not stop.is_set():
                both.kernel.unload(0, 1)
                both.kernel.load(0, 5, other)  # maybe to where expert 1 was
                both.kernel.unload(0, 5)
                both.kernel.load(0, 1, both.weights[1])
                stop.wait(0.05)

        thread = threading.Thread(target=churn)
        thread.start()
        answers = 0
        try:
            while answers < 3:
                try:
                    out_TH = both.kernel(*one, 0)
                except LookupError:
                    time.sleep(0.001)
                else:
                    assert torch.equal(out_TH, right_TH)
                    answers += 1
        finally:
            stop.set()
            thread.join()


@each_dtype
def test_the_source_may_be_freed(dtype: torch.dtype) -> None:
    with layer(dtype, "clamped", 48, 32, 1) as both:
        weights = expert(FORMS["clamped"], 48, 32, dtype, torch.Generator().manual_seed(5))
        both.kernel.load(0, 0, weights)
        one = batch(3, 48, [0, 0, 0], 1, dtype, 0)
        before_TH = both.kernel(*one, 0)
        weights.up.zero_()
        weights.down.zero_()
        assert torch.equal(both.kernel(*one, 0), before_TH)


@each_dtype
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_float_dtype_as_input(dtype: torch.dtype, given: torch.dtype) -> None:
    with layer(dtype, "swiglu", 48, 32, 2) as both:
        x_TH, ids_TK, scores_TK = batch(4, 48, [0, 1, 1, 0], 1, torch.bfloat16, 0)
        out_TH = both.kernel(x_TH.to(given), ids_TK.to(torch.int64), scores_TK, 0)
        # The experts' outputs are rounded to bfloat16 if the tokens are.
        alike = given if given is torch.bfloat16 else torch.float32
        assert torch.equal(out_TH, both.kernel(x_TH.to(alike), ids_TK, scores_TK, 0))
        assert (out_TH.bfloat16().float().equal(out_TH)) is (given is torch.bfloat16)


@each_dtype
def test_division_of_the_experts_among_servers(dtype: torch.dtype) -> None:
    experts, tokens, top_k = 12, 16, 8
    with layer(dtype, "swiglu", 50, 40, experts) as both:
        draw = torch.Generator().manual_seed(0)
        x_TH = torch.randn(tokens, 50, generator=draw).bfloat16()
        ids_TK = torch.stack(
            [torch.randperm(experts, generator=draw)[:top_k] for _ in range(tokens)]
        )
        scores_TK = torch.rand(tokens, top_k, generator=draw).softmax(1)
        whole_TH = both.kernel(x_TH, ids_TK.int(), scores_TK, 0)
        server_E = torch.randint(3, (experts,), generator=draw)
        sum_TH = torch.zeros_like(whole_TH)
        for server in range(3):
            own_TK = ids_TK.where(server_E[ids_TK] == server, -1).int()
            sum_TH += both.kernel(x_TH, own_TK, scores_TK, 0)
    assert torch.equal(sum_TH.bfloat16(), whole_TH.bfloat16())


def test_counts_its_experts_tokens() -> None:
    with layer(torch.float32, "relu", 32, 16, 7) as both:
        counts_LX = np.zeros((1, 1 + 8), np.int64)
        both.kernel.count_into(counts_LX)
        for ids in ([[0, 6], [6, -1]], [[-1, -1]], [[2, 6]]):
            ids_TK = torch.tensor(ids)
            both.kernel(torch.ones(len(ids), 32), ids_TK, torch.ones(len(ids), 2), 0)
    assert counts_LX.tolist() == [[4, 1, 0, 1, 0, 0, 0, 3, 0]]
