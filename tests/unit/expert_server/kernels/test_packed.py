"""Properties of the packed kernel only; test_kernels.py compares it with the reference."""

import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional

from expert_server.kernels import KernelSpec, Quantization, ReferenceKernel
from expert_server.kernels import packed as packed_module
from expert_server.kernels import products as products_module
from expert_server.kernels.kernel import UnsupportedError
from expert_server.kernels.packed import PackedKernel
from expert_server.kernels.products import best_products
from expert_server.weights.weights import ExpertForm, ExpertWeights

BOUND = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def swiglu(product: torch.Tensor) -> torch.Tensor:
    gate, up = product.chunk(2, dim=-1)
    return functional.silu(gate) * up


def interleaved_geglu(product: torch.Tensor) -> torch.Tensor:
    return functional.gelu(product[..., ::2]) * product[..., 1::2]


def unknown_gate(product: torch.Tensor) -> torch.Tensor:
    gate, up = product.chunk(2, dim=-1)
    return torch.tanh(gate) * up


FORMS = [
    ExpertForm(True, False, swiglu),
    ExpertForm(True, True, interleaved_geglu),
    ExpertForm(True, False, unknown_gate),
    ExpertForm(False, True, torch.atan),
    ExpertForm(False, False, functional.silu),
    ExpertForm(False, False, functional.relu),
]
each_dtype = pytest.mark.parametrize("dtype", list(BOUND), ids=str)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def expert(form: ExpertForm, hidden: int, intermediate: int, seed: int) -> ExpertWeights:
    rng = torch.Generator().manual_seed(seed)
    width = 2 * intermediate if form.has_gate else intermediate
    up = torch.randn(width, hidden, generator=rng) / hidden**0.5
    down = torch.randn(hidden, intermediate, generator=rng) / intermediate**0.5
    biases = torch.randn(width, generator=rng), torch.randn(hidden, generator=rng)
    return (
        ExpertWeights(up.t(), down.t(), *biases) if form.is_transposed else ExpertWeights(up, down)
    )


def both(
    forms: list[ExpertForm], dtype: torch.dtype, experts: int, hidden: int = 72
) -> tuple[PackedKernel, ReferenceKernel]:
    """A kernel and the reference in float64 with the same experts in every layer."""
    kernel = PackedKernel(forms, KernelSpec(dtype))
    reference = ReferenceKernel(forms, KernelSpec(torch.float64))
    for layer, form in enumerate(forms):
        for number in range(experts):
            weights = expert(form, hidden, 40, 10 * layer + number).to(dtype)
            kernel.load(layer, number, weights)
            reference.load(layer, number, weights)
    return kernel, reference


def batch(
    ids_TK: torch.Tensor, dtype: torch.dtype, hidden: int = 72
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(len(ids_TK))
    x_TH = torch.randn(len(ids_TK), hidden, generator=rng).to(dtype)
    return x_TH, ids_TK, torch.rand(ids_TK.shape, generator=rng)


def error(out_TH: torch.Tensor, right_TH: torch.Tensor) -> float:
    return (out_TH - right_TH).norm().item() / right_TH.norm().item()


@each_dtype
def test_each_layer_has_its_own_form(dtype: torch.dtype) -> None:
    """Also with unknown activations, and biases."""
    kernel, reference = both(FORMS, dtype, 3)
    one = batch(torch.tensor([[0, 1], [2, -1], [1, 1], [0, 2], [1, 0]]), dtype)
    for layer in range(len(FORMS)):
        assert error(kernel(*one, layer), reference(*one, layer)) < BOUND[dtype]


@each_dtype
@pytest.mark.parametrize("rows", [511, 512, 513, 1100])
def test_more_rows_than_a_chunk(dtype: torch.dtype, rows: int) -> None:
    """One expert has this many rows; others come before, after and in the same tokens."""
    kernel, reference = both(FORMS[:2], dtype, 4)
    ids_TK = torch.full((rows, 2), 1)
    ids_TK[:, 1] = torch.arange(rows) % 5 - 1
    one = batch(ids_TK, dtype)
    for layer in range(2):
        assert error(kernel(*one, layer), reference(*one, layer)) < BOUND[dtype]


@each_dtype
@pytest.mark.parametrize("hidden", [40, 72])
def test_small_pieces_of_the_sum(
    dtype: torch.dtype, hidden: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_module, "_SUM_BYTES", 3 * 4 * 40)
    kernel, reference = both(FORMS[:1], dtype, 4, hidden)
    one = batch(torch.arange(60).reshape(20, 3) % 4, dtype, hidden)
    assert error(kernel(*one, 0), reference(*one, 0)) < BOUND[dtype]


@each_dtype
def test_the_steady_state_allocates_no_buffers(dtype: torch.dtype) -> None:
    kernel, _ = both(FORMS[:1], dtype, 4)
    large = batch(torch.arange(120).reshape(40, 3) % 4, torch.float64)
    small = batch(torch.arange(6).reshape(2, 3) % 4, torch.float64)
    out_TH = kernel(*large, 0)
    buffers = {name: buffer.data_ptr() for name, buffer in kernel._scratch.items()}
    assert {"x", "rows", "product", "hidden", "weighted", "out"} == set(buffers)
    for one in (small, large):
        assert kernel(*one, 0).data_ptr() == out_TH.data_ptr()
        assert {name: buffer.data_ptr() for name, buffer in kernel._scratch.items()} == buffers
    kernel.close()
    assert not kernel._scratch


@pytest.mark.parametrize("quantization", [Quantization.INT8, Quantization.INT4])
def test_quantised_weights_are_unsupported(quantization: Quantization) -> None:
    with pytest.raises(UnsupportedError, match=quantization):
        PackedKernel(FORMS, KernelSpec(torch.float32, quantization))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16])
def test_other_dtypes_are_unsupported(dtype: torch.dtype) -> None:
    with pytest.raises(UnsupportedError, match=f"{dtype}.*bfloat16 or float32"):
        PackedKernel(FORMS, KernelSpec(dtype))


class _Missing:
    def __init__(self, dtype: torch.dtype) -> None:
        raise AttributeError("'mkldnn' has no attribute '_linear_pointwise'")


class _Refusing(products_module._OneDnnPlain):
    def multiply(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        raise RuntimeError("could not create a primitive")


@each_dtype
@pytest.mark.parametrize("stand_in", [_Missing, _Refusing])
def test_without_the_private_operations(
    dtype: torch.dtype,
    stand_in: type,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(products_module, "_OneDnnPacked", stand_in)
    monkeypatch.setattr(products_module, "_OneDnnPlain", stand_in)
    best_products.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            kernel, reference = both(FORMS, dtype, 3)
            PackedKernel(FORMS, KernelSpec(dtype))
    finally:
        best_products.cache_clear()
    assert len([record for record in caplog.records if "oneDNN" in record.message]) == 1
    one = batch(torch.tensor([[0, 1], [2, -1], [1, 1], [0, 2], [1, 0]]), dtype)
    for layer in range(len(FORMS)):
        assert error(kernel(*one, layer), reference(*one, layer)) < BOUND[dtype]


@each_dtype
def test_bytes_are_those_of_the_packed_experts(dtype: torch.dtype) -> None:
    """At least the weights' bytes, at most these padded to blocks of 64; all are freed by `unload`."""
    kernel = PackedKernel(FORMS, KernelSpec(dtype))
    plain = padded = 0
    for layer, form in enumerate(FORMS):
        weights = expert(form, 72, 40, layer).to(dtype)
        kernel.load(layer, 0, weights)
        plain += weights.nbytes
        padded += dtype.itemsize * (128 * 128 + 128 * 64) + 4 * (128 + 128)
    assert plain <= kernel.bytes <= padded
    for layer in range(len(FORMS)):
        kernel.unload(layer, 0)
    assert kernel.bytes == 0


_MEMORY = """
import os, random, sys, torch
from expert_server.kernels import KernelSpec, packed
from expert_server.kernels.packed import PackedKernel
from expert_server.weights.weights import ExpertForm, ExpertWeights

def resident():
    with open("/proc/self/status") as status:
        return int(next(line for line in status if line.startswith("VmRSS")).split()[1]) * 1024

def swiglu(product):
    gate, up = product.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up

def measure(dtype, transposed):
    up, down = torch.ones(512, 1000), torch.ones(1000, 256)
    weights = ExpertWeights(up.t(), down.t()) if transposed else ExpertWeights(up, down)
    kernel = PackedKernel([ExpertForm(True, transposed, swiglu)], KernelSpec(dtype))
    kernel.load(0, 0, weights)
    kernel.unload(0, 0)
    before = resident()
    for number in range(60):
        kernel.load(0, number, weights)
    loaded = resident() - before
    held, rng = list(range(60)), random.Random(0)
    for number in range(60, 360):
        kernel.unload(0, held.pop(rng.randrange(60)))
        kernel.load(0, number, weights)
        held.append(number)
    return kernel.bytes, loaded, resident() - before

torch.set_num_threads(1)
packed._KEPT_BYTES = 1 << 20
# One measurement must not affect the next; torch is imported once.
for dtype in sys.argv[1:]:
    for layout in ("plain", "transposed"):
        if os.fork() == 0:
            print(dtype, layout, *measure(getattr(torch, dtype), layout == "transposed"), flush=True)
            os._exit(0)
        if os.wait()[1] != 0:
            sys.exit("a measurement has failed")
"""


@pytest.fixture(scope="module")
def resident() -> dict[tuple[torch.dtype, str], list[int]]:
    """Measure a kernel alone: its bytes, memory for 60 experts, and after 300 loads and unloads."""
    said = subprocess.run(
        [sys.executable, "-c", _MEMORY, *(str(dtype).removeprefix("torch.") for dtype in BOUND)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    rows = [line.split() for line in said.splitlines()]
    return {
        (getattr(torch, dtype), layout): [int(count) for count in counts]
        for dtype, layout, *counts in rows
    }


@each_dtype
@pytest.mark.parametrize("layout", ["plain", "transposed"])
def test_resident_memory(
    resident: dict[tuple[torch.dtype, str], list[int]], dtype: torch.dtype, layout: str
) -> None:
    """Memory holds only the packed experts, even after many loads and unloads."""
    held, loaded, churned = resident[dtype, layout]
    assert 0.9 * held < loaded < 1.1 * held
    assert churned < (1.1 + 1 / 8) * held
