"""What a server says of its kernel, and what it computes with."""

from collections.abc import Iterator

import pytest
import torch

from eaas.checkpoint import Checkpoint
from eaas.demo_model import write_demo_model
from expert_server.kernels import KernelSpec, Quantization, ReferenceKernel
from expert_server.main import _compute_dtype, _describe
from expert_server.weights import ExpertReader


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> ExpertReader:
    path = tmp_path_factory.mktemp("demo") / "x"
    write_demo_model(path, "qwen3_moe", layers=2, hidden=64, experts=2, top_k=1, vocab=262)
    return ExpertReader(Checkpoint.open(path))


def kernel(reader: ExpertReader, spec: KernelSpec) -> ReferenceKernel:
    return ReferenceKernel(reader.forms, spec)


@pytest.mark.parametrize("own", [torch.float32, torch.bfloat16, torch.float64])
def test_weights_are_computed_with_as_they_are(own: torch.dtype) -> None:
    assert _compute_dtype(own) == own


def test_float16_loses_nothing() -> None:
    every = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    numbers = every[~every.isnan()]
    dtype = _compute_dtype(torch.float16)
    assert dtype != torch.float16
    assert torch.equal(numbers.to(dtype).half(), numbers)


def test_a_plain_kernel(reader: ExpertReader) -> None:
    assert _describe(kernel(reader, KernelSpec(torch.float32)), reader) == "reference (float32)"


def test_instructions_and_another_dtype_are_named(reader: ExpertReader) -> None:
    class Native(ReferenceKernel):
        name = "native"
        isa = "amx"

    line = _describe(Native(reader.forms, KernelSpec(torch.bfloat16)), reader)
    assert line == "native (bfloat16 for float32, amx)"


def test_quantised_weights_have_an_error(reader: ExpertReader) -> None:
    percent = {}
    for quantization in (Quantization.INT8, Quantization.INT4):
        line = _describe(kernel(reader, KernelSpec(torch.float32, quantization)), reader)
        begin, _, value = line.removesuffix(" %").rpartition(" ")
        assert begin == f"reference (float32); {quantization} weights: relative error"
        percent[quantization] = float(value)
    assert 0.1 < percent[Quantization.INT8] < 2 < percent[Quantization.INT4] < 25
