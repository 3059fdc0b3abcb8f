"""Kernel `triton` on a GPU, against the reference in float64; skipped without one."""

from __future__ import annotations

import threading
from importlib.util import find_spec

import pytest
import torch

from eaas.checkpoint.quantized import WeightFormat
from expert_layers import BOUND, FORMS, batch, expert, relative_error
from expert_server.kernels import ExpertKernel, KernelSpec, ReferenceKernel, StoredFormat
from expert_server.kernels.choose import ON_REQUEST
from expert_server.kernels.random_matrix import random_matrix
from expert_server.weights.weights import ExpertWeights

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU"),
    pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed"),
]

EXPERTS, TOP_K = 8, 4
SPECS = [
    KernelSpec(torch.float32),
    KernelSpec(torch.bfloat16),
    KernelSpec(torch.bfloat16, stored=StoredFormat(WeightFormat.FP8, 128)),
    KernelSpec(torch.bfloat16, stored=StoredFormat(WeightFormat.MXFP4, 32)),
]
each_spec = pytest.mark.parametrize("spec", SPECS, ids=lambda s: str(s.stored or s.dtype))


def experts(spec: KernelSpec, hidden: int, intermediate: int) -> list[ExpertWeights]:
    rng = torch.Generator().manual_seed(0)
    stored = spec.stored
    if stored is None:
        form = FORMS["swiglu"]
        return [expert(form, hidden, intermediate, spec.dtype, rng) for _ in range(EXPERTS)]
    return [
        ExpertWeights(
            random_matrix(stored, 2 * intermediate, hidden, rng),
            random_matrix(stored, hidden, intermediate, rng),
        )
        for _ in range(EXPERTS)
    ]


def ids(tokens: int) -> list[int]:
    rng = torch.Generator().manual_seed(tokens)
    some: list[int] = torch.randint(-1, EXPERTS, (tokens * TOP_K,), generator=rng).tolist()
    return some


@each_spec
@pytest.mark.parametrize(("hidden", "intermediate"), [(512, 256), (300, 130)])
def test_equals_the_reference(spec: KernelSpec, hidden: int, intermediate: int) -> None:
    """Few rows per expert and many; sizes with and without padding."""
    form = FORMS["swiglu"]
    kernel = ON_REQUEST["triton"]([form], spec)
    reference = ReferenceKernel([form], KernelSpec(torch.float64))
    for number, weights in enumerate(experts(spec, hidden, intermediate)):
        kernel.load(0, number, weights)
        reference.load(0, number, weights)
    for tokens in (1, 7, 64, 300):
        one = batch(tokens, hidden, ids(tokens), TOP_K, spec.dtype, 0)
        assert relative_error(kernel, reference, *one) < BOUND[spec.dtype], tokens
    kernel.close()


def churn(kernel: ExpertKernel, weights: ExpertWeights, stop: threading.Event) -> None:
    while not stop.is_set():
        kernel.unload(0, EXPERTS)
        kernel.load(0, EXPERTS, weights)


@each_spec
def test_loads_and_unloads_while_it_computes(spec: KernelSpec) -> None:
    """Each answer has the bits of the first: no batch reads memory that a load writes."""
    kernel = ON_REQUEST["triton"]([FORMS["swiglu"]], spec)
    weights = experts(spec, 512, 256)
    for number, each in enumerate(weights):
        kernel.load(0, number, each)
    # So few that tiles are small, with either number of experts.
    one = batch(16, 512, ids(16), TOP_K, spec.dtype, 0)
    right_TH = kernel(*one, 0).clone()
    stop = threading.Event()
    thread = threading.Thread(target=churn, args=(kernel, weights[0], stop))
    thread.start()
    try:
        for _ in range(200):
            assert torch.equal(kernel(*one, 0), right_TH)
    finally:
        stop.set()
        thread.join()
        kernel.close()
