"""Every kernel with every format of weights, against the reference in float64 with the same weights."""

import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from expert_layers import (
    BOUND,
    FLOATS,
    FORMATS,
    FORMS,
    STORED,
    TRITON,
    Candidate,
    batch,
    check_unloading,
    layer,
    over,
)
from expert_server.kernels import ExpertKernel, KernelSpec, ReferenceKernel, panels
from expert_server.weights.weights import ExpertForm, ExpertWeights
from interpreted_triton import round_rows_alike

# Compilation of emulated tiles takes ten seconds, alone.
pytestmark = pytest.mark.timeout(600)


def by_day(stored: list[Candidate]) -> list[Any]:
    """All instruction sets with one format of each code, two of them with the others; the rest at night."""
    whole = {FORMATS[index] for index in (0, 2, 8, 13)}
    found: list[Any] = []
    for one in stored:
        place = FORMATS.index(one.spec.stored) if one.spec.stored else 0
        kernels = [each for each in STORED if each.spec == one.spec]
        is_corner = one.spec.stored in whole or one in kernels[place % 2 :: 2]
        found.append(one if is_corner else pytest.param(one, marks=pytest.mark.nightly))
    return found


STORED_BY_DAY = by_day(STORED)
each_kernel = over([*FLOATS, *(one for one in TRITON if one.spec.stored is None)])
each_kernel_and_format = over([*FLOATS, *STORED_BY_DAY, *TRITON])
each_native = over([one for one in FLOATS if one.is_native])
each_with_tiles = over([one for one in (*FLOATS, *STORED) if one.has_tiles])
# Few rows, one tile, tiles of unequal height, more than one block of rows.
TOKENS = (1, 2, 3, 4, 5, 8, 15, 16, 17, 33, 63, 100, 199)
RELU = ExpertForm(False, False, functional.relu)


def many(candidate: Candidate, *tokens: int) -> list[int]:
    """Give numbers of tokens; an interpreted call takes a quarter of a second and more, and gets fewer."""
    return [min(count, 17) for count in tokens] if candidate.isa == "triton" else [*tokens]


def check(
    candidate: Candidate,
    prove: Callable[[st.DataObject], None],
    most: int,
    stored: int = 4,
    interpreted: int = 3,
) -> None:
    """Prove something for so many examples."""
    examples = most if candidate.spec.stored is None else stored
    if candidate.isa == "triton":
        examples = interpreted
    settings(max_examples=examples, deadline=None)(given(st.data())(prove))()


# With fewer than 8 numbers, bfloat16's rounding may reach its bound; see `test_tiny_experts`.
sizes = st.one_of(st.integers(8, 70), st.sampled_from([96, 128, 130, 144, 200, 256, 300]))
# An interpreted call takes a quarter of a second for each pair of tiles.
few_sizes = st.one_of(st.integers(8, 70), st.sampled_from([128, 130]))


@each_kernel_and_format
def test_equals_the_reference(candidate: Candidate) -> None:
    """Odd sizes, no tokens, ids of -1, an expert twice in a token, scores of 0; groups that are not whole."""

    def prove(data: st.DataObject) -> None:
        form = data.draw(st.sampled_from(sorted(FORMS)))
        size = few_sizes if candidate.isa == "triton" else sizes
        hidden, intermediate = data.draw(size), data.draw(size)
        experts, top_k = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4))
        tokens = data.draw(
            st.one_of(st.integers(0, 8), st.sampled_from(many(candidate, 17, 33, 70)))
        )
        count, seed = tokens * top_k, data.draw(st.integers(0, 99))
        ids = data.draw(st.lists(st.integers(-1, experts - 1), min_size=count, max_size=count))
        with layer(candidate, form, hidden, intermediate, experts, seed) as both:
            one = candidate.batch(tokens, hidden, ids, top_k, seed)
            assert both.error(*one) < candidate.bound

    check(candidate, prove, 25, stored=6, interpreted=5)


@each_kernel
@pytest.mark.parametrize("form", FORMS)
def test_every_activation(candidate: Candidate, form: str) -> None:
    with layer(candidate, form, 96, 40, 2) as both:
        assert both.error(*candidate.batch(3, 96, [0, 1, 1, -1, 0, 1], 2)) < candidate.bound


@each_kernel
@pytest.mark.parametrize(("hidden", "intermediate"), [(1, 1), (1, 40), (33, 1), (3, 2)])
def test_tiny_experts(candidate: Candidate, hidden: int, intermediate: int) -> None:
    with layer(candidate, "swiglu", hidden, intermediate, 2) as both:
        one = candidate.batch(3, hidden, [0, 1, 1, -1, 0, 0], 2)
        assert both.error(*one) < 3 * candidate.bound


@each_kernel
def test_all_tokens_to_one_expert(candidate: Candidate) -> None:
    """One expert has all tokens, the others none: each edge of a block of rows or a tile."""
    few, tiles = (1, 2, 3, 4, 5, 6, 7, 32, 33, 95, 127, 300), (16, 17, 96, 129)
    with layer(candidate, "swiglu", 96, 80, 3) as both:
        for rows in tiles if candidate.isa == "triton" else few + tiles:
            one = candidate.batch(rows, 96, [1] * rows, 1, rows)
            assert both.error(*one) < candidate.bound, rows


@each_kernel_and_format
def test_poison_stays_in_its_row(candidate: Candidate) -> None:
    """A whole row, or some NaN in it."""

    def prove(data: st.DataObject) -> None:
        tokens = data.draw(st.integers(1, *many(candidate, 40)))
        row = data.draw(st.integers(0, tokens - 1))
        poison = data.draw(st.sampled_from([float("nan"), float("inf"), -float("inf")]))
        is_small = candidate.spec.stored is None or candidate.isa == "triton"
        hidden, intermediate = (40, 24) if is_small else (130, 40)
        step = data.draw(st.sampled_from([1, 39])) if poison != poison else 1
        ids = data.draw(st.lists(st.integers(-1, 3), min_size=tokens * 2, max_size=tokens * 2))
        form = data.draw(st.sampled_from(["swiglu", "clamped", "gelu"]))
        with layer(candidate, form, hidden, intermediate, 4, tokens) as both:
            x_TH, ids_TK, scores_TK = candidate.batch(tokens, hidden, ids, 2, tokens)
            scores_TK += 0.5
            clean_TH = both.kernel(x_TH, ids_TK, scores_TK, 0).clone()
            x_TH[row, ::step] = poison
            out_TH = both.kernel(x_TH, ids_TK, scores_TK, 0).clone()
            again_TH = both.kernel(x_TH.where(x_TH.isfinite(), 0), ids_TK, scores_TK, 0).clone()
        others = torch.arange(tokens) != row
        assert torch.equal(out_TH[others], clean_TH[others])
        # It does not stay in memory that the next call uses, either.
        assert torch.equal(again_TH[others], clean_TH[others])
        assert bool(out_TH[row].isfinite().all()) is not bool((ids_TK[row] >= 0).any())
        assert bool(again_TH.isfinite().all())

    check(candidate, prove, 15)


@over([*FLOATS, *TRITON])
def test_a_token_alone_and_in_a_shuffled_batch(candidate, monkeypatch) -> None:
    """Bit for bit, except for the reference."""
    if candidate.isa == "triton":
        round_rows_alike(monkeypatch)

    hidden, intermediate = (40, 24) if candidate.isa == "triton" else (130, 70)

    def prove(data: st.DataObject) -> None:
        tokens = data.draw(st.integers(1, *many(candidate, 60)))
        ids = data.draw(st.lists(st.integers(-1, 3), min_size=tokens * 3, max_size=tokens * 3))
        with layer(candidate, "swiglu", hidden, intermediate, 4, tokens) as both:
            x_TH, ids_TK, scores_TK = candidate.batch(tokens, hidden, ids, 3, tokens)
            out_TH = both.kernel(x_TH, ids_TK, scores_TK, 0).clone()
            token = data.draw(st.integers(0, tokens - 1))
            one = slice(token, token + 1)
            alone_1H = both.kernel(x_TH[one], ids_TK[one], scores_TK[one], 0).clone()
            order = torch.randperm(tokens, generator=torch.Generator().manual_seed(tokens))
            shuffled_TH = both.kernel(x_TH[order], ids_TK[order], scores_TK[order], 0).clone()
        if candidate.isa != "reference":
            assert torch.equal(alone_1H, out_TH[one])
            assert torch.equal(shuffled_TH, out_TH[order])
        assert (alone_1H - out_TH[one]).norm() <= candidate.bound * out_TH[one].norm()
        assert (shuffled_TH - out_TH[order]).norm() <= candidate.bound * out_TH.norm()

    check(candidate, prove, 15)


@over([*STORED_BY_DAY, *(one for one in FLOATS if one.has_tiles)])
def test_any_number_of_rows_and_threads(candidate: Candidate) -> None:
    """Bit for bit: products of few rows are not computed with tiles. More inputs than a segment."""
    with layer(candidate, "clamped", 1312, 160, 2, seed=1) as both:
        dice = torch.rand(200, generator=torch.Generator().manual_seed(0))
        one = candidate.batch(200, 1312, (dice < 0.2).int().tolist(), 1)
        assert both.error(*one) < candidate.bound
        out_TH = both.kernel(*one, 0).clone()
        other = candidate.create(FORMS["clamped"], threads=3)
        for number, weights in enumerate(both.weights):
            other.load(0, number, weights)
        assert torch.equal(other(*one, 0), out_TH)
        other.close()
        for tokens in TOKENS:
            some = slice(1, 1 + tokens)
            assert torch.equal(both.kernel(*(part[some] for part in one), 0), out_TH[some]), tokens


@over([one for one in (*FLOATS, *STORED) if one.isa == "amx-int8"])
def test_same_bits_with_and_without_tiles(candidate: Candidate) -> None:
    twin = Candidate(candidate.spec, "avx512-vnni", candidate.is_emulated)
    with layer(candidate, "swiglu", 720, 144, 2) as both, layer(twin, "swiglu", 720, 144, 2) as two:
        for tokens in (*TOKENS, 512):
            one = candidate.batch(tokens, 720, [0] + [1] * (tokens - 1), 1, tokens)
            assert torch.equal(both.kernel(*one, 0), two.kernel(*one, 0)), tokens


@over([one for one in FLOATS if one.isa == "amx-bf16"])
@pytest.mark.parametrize("rows", [17, 34, 49, 67, 130, 161])
def test_tiles_that_reach_beyond_an_experts_rows(candidate: Candidate, rows: int) -> None:
    """NaN of another expert's rows, and then of an earlier batch."""
    with layer(candidate, "swiglu", 200, 72, 2) as both:
        one = candidate.batch(rows + 20, 200, [0] * rows + [1] * 20, 1)
        one[0][rows:] = float("nan")
        own = [part[:rows] for part in one]
        out_TH = both.kernel(*one, 0)[:rows].clone()
        assert both.error(*own) < candidate.bound
        assert torch.equal(both.kernel(*own, 0), out_TH)


@over([one for one in (*FLOATS, *STORED) if one.isa == "amx-bf16"])
def test_subnormals_are_zero(candidate: Candidate) -> None:
    """As tiles take them: inputs, and sums; whatever the number of rows."""
    with layer(candidate, RELU, 256, 128, 2) as both:
        x_TH, ids_TK, scores_TK = candidate.batch(40, 256, [0] * 30 + [1] * 10, 1)
        for size, is_zero in (
            (1e-30, {False}),
            (1e-37, {False, True}),
            (1e-38, {False, True}),
            (1e-39, {True}),
        ):
            out_TH = both.kernel(x_TH * size, ids_TK, scores_TK, 0).clone()
            for tokens in (1, 4, 7):
                some = slice(tokens)
                few_TH = both.kernel(x_TH[some] * size, ids_TK[some], scores_TK[some], 0)
                assert torch.equal(few_TH, out_TH[some])
            assert (not out_TH.any()) in is_zero


@each_with_tiles
def test_auto_takes_the_tiles(candidate: Candidate) -> None:
    with candidate.installed():
        kinds = panels._native.kinds()
        wanted = panels.panel_format(candidate.spec)
        assert next(isa for _, isa, weights, _ in kinds if weights == wanted) == candidate.isa


@each_native
@pytest.mark.parametrize(
    ("x_size", "weight_size"),
    [(1e-18, 1e-18), (1e-19, 1e-19), (1e-20, 1e-20), (1e-30, 1e-30), (1e-39, 1e10)],
)
def test_rows_about_the_least_normal_number(candidate, x_size, weight_size) -> None:
    """The least normal float32 is 1e-38. Below it, few rows and many must round alike, or both to zero."""
    with layer(candidate, "gelu", 96, 80, 1) as both:
        up, down = both.weights[0].up, both.weights[0].down
        both.kernel.load(0, 0, ExpertWeights(up * weight_size, down))
        both.kernel.load(0, 1, ExpertWeights(up, down * weight_size))
        for number in range(2):
            x_TH, ids_TK, _ = candidate.batch(20, 96, [number] * 20, 1)
            one = x_TH * x_size, ids_TK, torch.ones(20, 1)
            out_TH = both.kernel(*one, 0).clone()
            assert bool(out_TH.isfinite().all())
            for rows in (1, 2, 3, 4, 8):
                for first in range(0, 20, rows):
                    some = slice(first, first + rows)
                    few_RH = both.kernel(*(part[some] for part in one), 0)
                    assert torch.equal(few_RH, out_TH[some])


@over([one for one in TRITON if one.spec == KernelSpec(torch.bfloat16)])
def test_triton_rounds_to_nearest_even_like_a_gpu(candidate: Candidate) -> None:
    """Each result is one product of two bfloat16 numbers, exact in float32, and rounded once."""
    rng = torch.Generator().manual_seed(0)
    weights = torch.randn(64, generator=rng).bfloat16().abs()
    # Products with a half, one, and one and a half of the last bit, too.
    weights[:4] = torch.tensor([1.0, 1.0078125, 1.5, 1.0234375])
    x_TH = torch.randn(8, 64, generator=rng).bfloat16()
    x_TH[0] = 1.0078125
    with layer(candidate, RELU, 1, 1, 0) as both:
        both.kernel.load(0, 0, ExpertWeights(torch.diag(weights), torch.eye(64).bfloat16()))
        out_TH = both.kernel(x_TH, torch.zeros(8, 1, dtype=torch.int32), torch.ones(8, 1), 0)
    assert torch.equal(out_TH, (x_TH.float() * weights.float()).relu().bfloat16().float())


@each_kernel
@pytest.mark.parametrize("name", ["swiglu", "clamped"])
def test_a_very_negative_gate_gives_zero(candidate: Candidate, name: str) -> None:
    """gate * sigmoid(gate) goes to 0 for very negative gates, and must not grow again."""
    is_transposed = FORMS[name].is_transposed
    gates = torch.tensor([-100.0, -1e4, -1e30, 1.0])
    gate_and_up = torch.stack([gates, torch.ones(4)], dim=1 if is_transposed else 0).flatten()
    up = torch.zeros(4, 8) if is_transposed else torch.zeros(8, 4)
    weights = ExpertWeights(up, torch.eye(4), gate_and_up, torch.zeros(4)).to(candidate.dtype)
    one = torch.ones(1, 4), torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1)
    with layer(candidate, name, 4, 4, 0) as both:
        for each in (both.kernel, both.reference):
            each.load(0, 0, weights)
        out_H, right_H = both.kernel(*one, 0)[0], both.reference(*one, 0)[0]
        assert bool(((out_H - right_H).abs() <= right_H.abs() * candidate.bound + 1e-30).all())


@each_kernel
@pytest.mark.parametrize("wrong", [3, 99, -2, 2**32, 2**32 - 1])
def test_an_expert_that_is_not_held(candidate: Candidate, wrong: int) -> None:
    """Truncated to 32 bits, the last ones would be 0 and -1."""
    with layer(candidate, "swiglu", 32, 16, 3) as both:
        one = torch.ones(2, 32), torch.tensor([[0, 1], [2, wrong]]), torch.ones(2, 2)
        with pytest.raises(LookupError, match=f"layer 0: expert {wrong} is not held"):
            both.kernel(*one, 0)
        with pytest.raises(LookupError, match="layer 7"):
            both.kernel(*one, 7)


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
def test_shapes_that_do_not_match(candidate, x, ids, scores) -> None:
    with layer(candidate, "swiglu", 32, 16, 1) as both:
        one = torch.ones(x), torch.zeros(ids, dtype=torch.int32), torch.ones(scores)
        shapes = re.escape(f"x {x}, ids {ids}, scores {scores}: ")
        with pytest.raises(ValueError, match=f"^{shapes}"):
            both.kernel(*one, 0)
        # The compiled kernel and a GPU read by address and must check by themselves. Torch checks for others.
        for hidden in (24, 40):
            one = torch.ones(5, hidden), torch.zeros(5, 2, dtype=torch.int32), torch.ones(5, 2)
            with pytest.raises((ValueError, RuntimeError)):
                both.kernel(*one, 0)


@each_kernel
def test_load_and_unload(candidate: Candidate) -> None:
    """The source may be freed after a load."""
    with layer(candidate, "swiglu", 48, 32, 3) as both:
        one = candidate.batch(3, 48, [0, 0, 0], 1)
        before_TH = both.kernel(*one, 0).clone()
        source = both.weights[0]
        both.weights[0] = ExpertWeights(source.up.clone(), source.down.clone())
        source.up.zero_()
        source.down.zero_()
        assert torch.equal(both.kernel(*one, 0), before_TH)
        check_unloading(both.kernel, both.weights, candidate.dtype)


@each_kernel
def test_load_and_unload_during_computation(candidate: Candidate) -> None:
    """Also for experts of the batch: the result is right or an error, never from other memory."""
    is_slow = candidate.isa == "triton"
    with layer(candidate, "swiglu", 96, 64, 4) as both:
        one = candidate.batch(4, 96, [0, 1, 2, -1] * 2, 2)
        right_TH = both.kernel(*one, 0).clone()
        stop = threading.Event()

        def churn() -> None:
            while not stop.is_set():
                both.kernel.unload(0, 1)
                both.kernel.load(0, 5, both.weights[3])  # maybe to where expert 1 was
                both.kernel.unload(0, 5)
                both.kernel.load(0, 1, both.weights[1])
                stop.wait(0.05 if is_slow else 0.002)

        thread = threading.Thread(target=churn)
        thread.start()
        answers = missing = 0
        end = time.monotonic() + 0.1
        try:
            while time.monotonic() < end or answers < 3 or not (missing or is_slow):
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


@each_kernel
@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_float_dtype_as_input(candidate: Candidate, given: torch.dtype) -> None:
    with layer(candidate, "swiglu", 48, 32, 2) as both:
        x_TH, ids_TK, scores_TK = batch(4, 48, [0, 1, 1, 0], 1, torch.bfloat16, 0)
        out_TH = both.kernel(x_TH.to(given), ids_TK.to(torch.int64), scores_TK, 0).clone()
        # The experts' outputs are rounded to bfloat16 if the tokens are.
        alike = given if given is torch.bfloat16 else torch.float32
        assert torch.equal(out_TH, both.kernel(x_TH.to(alike), ids_TK, scores_TK, 0))
        assert (out_TH.bfloat16().float().equal(out_TH)) is (given is torch.bfloat16)


@each_kernel
@pytest.mark.parametrize("form", ["swiglu", "clamped"])
def test_division_of_the_experts_among_servers(candidate: Candidate, form: str) -> None:
    experts, tokens, top_k = (6, 9, 4) if candidate.isa == "triton" else (12, 32, 8)
    hidden, intermediate = (50, 40) if candidate.isa == "triton" else (200, 72)
    draw = torch.Generator().manual_seed(0)
    x_TH = torch.randn(tokens, hidden, generator=draw).bfloat16()
    ids_TK = torch.stack([torch.randperm(experts, generator=draw)[:top_k] for _ in range(tokens)])
    scores_TK = torch.rand(tokens, top_k, generator=draw).softmax(1)
    with layer(candidate, form, hidden, intermediate, experts) as both:
        whole_TH = both.kernel(x_TH, ids_TK.int(), scores_TK, 0).clone()
        for _ in range(1 if candidate.isa == "triton" else 5):
            server_E = torch.randint(3, (experts,), generator=draw)
            sum_TH = torch.zeros_like(whole_TH)
            for server in range(3):
                own_TK = ids_TK.where(server_E[ids_TK] == server, -1).int()
                sum_TH += both.kernel(x_TH, own_TK, scores_TK, 0)
            assert torch.equal(sum_TH.bfloat16(), whole_TH.bfloat16())


@each_kernel
def test_counts_its_experts_tokens(candidate: Candidate) -> None:
    with layer(candidate, "relu", 32, 16, 7) as both:
        counts_LX = np.zeros((1, 1 + 8), np.int64)
        both.kernel.count_into(counts_LX)
        with pytest.raises(LookupError):
            both.kernel(torch.ones(1, 32), torch.tensor([[0, 7]]), torch.ones(1, 2), 0)
        # The reference counts what it computes before the refusal.
        assert candidate.isa == "reference" or not counts_LX.any()
        counts_LX.fill(0)
        for ids in ([[0, 6], [6, -1]], [[-1, -1]], [[2, 6]]):
            both.kernel(torch.ones(len(ids), 32), torch.tensor(ids), torch.ones(len(ids), 2), 0)
    assert counts_LX.tolist() == [[4, 1, 0, 1, 0, 0, 0, 3, 0]]


@over([one for one in FLOATS if one.bound == 5e-4])
@pytest.mark.parametrize("size", [0.0, 1e-12, 1e-3, 1e15])
@pytest.mark.parametrize("outlier", [1.0, 300.0])
def test_quantised_activations_of_any_size(candidate, size, outlier) -> None:
    with layer(candidate, "swiglu", 256, 64, 2) as both:
        x_TH, ids_TK, scores_TK = candidate.batch(4, 256, [0, 1, 1, 0], 1)
        x_TH[:, 7] *= outlier
        assert both.error(x_TH * size, ids_TK, scores_TK + 0.1) < candidate.bound


@over([one for one in FLOATS if one.bound == 5e-4])
@pytest.mark.parametrize(("hidden", "intermediate"), [(2100, 72), (80, 1100), (1024, 128)])
def test_more_inputs_than_a_segment(candidate: Candidate, hidden: int, intermediate: int) -> None:
    with layer(candidate, "clamped", hidden, intermediate, 2) as both:
        one = candidate.batch(20, hidden, [0, 1] * 10, 1)
        assert both.error(*one) < candidate.bound
        out_TH = both.kernel(*one, 0).clone()
        for row in range(20):
            alone_1H = both.kernel(*(part[row : row + 1] for part in one), 0)
            assert torch.equal(alone_1H[0], out_TH[row])


def test_the_references_batch_is_the_sum_of_its_pairs() -> None:
    """An expert may come twice in a token; the other tests compare with the reference."""
    kernel: ExpertKernel = ReferenceKernel([FORMS["clamped"]], KernelSpec(torch.float32))
    reference = Candidate(KernelSpec(torch.float32), "reference")
    rng = torch.Generator().manual_seed(0)
    for number in range(3):
        kernel.load(0, number, reference.weights(FORMS["clamped"], 32, 24, rng))
    ids = torch.randint(-1, 3, (20 * 3,), generator=rng).tolist()
    x_TH, ids_TK, scores_TK = reference.batch(20, 32, ids, 3)
    wanted_TH = torch.zeros(20, 32)
    for token, k in np.ndindex(20, 3):
        at, one = slice(token, token + 1), slice(k, k + 1)
        wanted_TH[at] += kernel(x_TH[at], ids_TK[at, one], scores_TK[at, one], 0)
    error = (kernel(x_TH, ids_TK, scores_TK, 0) - wanted_TH).norm() / wanted_TH.norm()
    assert error < BOUND[torch.float32]
