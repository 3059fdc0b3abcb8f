"""Slots, loads and graphs of kernel `triton` on a GPU; skipped without one."""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import pytest
import torch

from expert_layers import FORMS, batch, expert, in_slots
from expert_server.kernels import KernelSpec

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 512, 256, 8, 4
FORM = FORMS["swiglu"]
SPEC = KernelSpec(torch.bfloat16)


@pytest.fixture
def kernel() -> Iterator[object]:
    from expert_server.kernels.gpu.device import Gpu
    from expert_server.kernels.gpu.kernel import TritonKernel

    kernel = TritonKernel([FORM] * 2, SPEC, Gpu("cuda"))
    rng = torch.Generator().manual_seed(0)
    for layer in range(2):
        for number in range(EXPERTS):
            kernel.load(layer, number, expert(FORM, HIDDEN, INTERMEDIATE, SPEC.dtype, rng))
    yield kernel
    kernel.close()


def request(tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, EXPERTS, (tokens * TOP_K,), generator=rng).tolist()
    x_TH, ids_TK, scores_TK = batch(tokens, HIDDEN, ids, TOP_K, torch.bfloat16, seed)
    return x_TH, ids_TK.int(), scores_TK


@pytest.mark.parametrize("is_pinned", [True, False])
def test_from_slot_to_slot(kernel, is_pinned: bool, caplog: pytest.LogCaptureFixture) -> None:
    memory = mmap.mmap(-1, 1 << 24)
    if is_pinned:
        kernel.pin_slots(memory)
        assert "cannot be page-locked" not in caplog.text
    requests, results = in_slots(memory, [request(n, seed) for seed, n in enumerate((3, 1, 300))])
    assert results[0].is_pinned() == is_pinned
    for _ in range(50):
        kernel.compute_slots(requests, results, 0)
        for one, result in zip(requests, results, strict=True):
            torch.testing.assert_close(result, kernel(*one, 0), rtol=1e-2, atol=1e-2)
            result.zero_()
    kernel.close()
    assert not results[0].is_pinned()


@pytest.mark.parametrize("tokens", [1, 3, 16, 100, 256])
def test_graphs_compute_as_single_launches_do(kernel, tokens: int) -> None:
    """In both layers, which share graphs."""
    one = request(tokens, tokens)
    kernel._graphs._is_on = False
    expected = [kernel(*one, layer) for layer in range(2)]
    kernel._graphs._is_on = True
    for _ in range(3):
        for layer in range(2):
            torch.testing.assert_close(kernel(*one, layer), expected[layer], rtol=1e-2, atol=1e-2)
    assert kernel._graphs._is_on, "no graph could be captured"


def test_sizes_come_for_the_first_time_while_experts_load(kernel) -> None:
    """Each first call captures a graph beside the loading thread. Prints how long it takes (`pytest -s`)."""
    weights = expert(FORM, HIDDEN, INTERMEDIATE, SPEC.dtype, torch.Generator().manual_seed(1))
    stop, results = threading.Event(), []

    def load() -> int:
        cycles = 0
        while not stop.is_set():
            kernel.load(0, EXPERTS, weights)
            kernel.unload(0, EXPERTS)
            cycles += 1
        return cycles

    with ThreadPoolExecutor(1) as thread:
        loads = thread.submit(load)
        try:
            for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 256, 300):
                one = request(tokens, tokens)
                took = []
                for _ in range(3):
                    began = time.perf_counter()
                    result_TH = kernel(*one, 0).clone()
                    took.append(1e3 * (time.perf_counter() - began))
                print(f"{tokens} tokens: first call {took[0]:.1f} ms, then {took[-1]:.2f} ms")
                results.append((one, result_TH))
        finally:
            stop.set()
    assert loads.result() > 0
    assert kernel._graphs._is_on, "no graph could be captured beside a load"
    kernel._graphs._is_on = False
    for one, result_TH in results:
        torch.testing.assert_close(kernel(*one, 0), result_TH, rtol=1e-2, atol=1e-2)
