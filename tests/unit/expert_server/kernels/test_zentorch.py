"""zentorch's products, where zentorch is; test_kernels.py compares the kernel with the reference."""

import sys
from importlib.util import find_spec

import pytest
import torch
from torch.nn import functional

from expert_server.kernels import KernelSpec, Quantization
from expert_server.kernels.kernel import UnsupportedError
from expert_server.kernels.zentorch import ZentorchKernel
from expert_server.weights.weights import ExpertForm, ExpertWeights

FORMS = [ExpertForm(False, False, functional.relu)]
BFLOAT16 = KernelSpec(torch.bfloat16)


@pytest.fixture
def avx512(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")


def test_missing(avx512: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zentorch", None)
    with pytest.raises(
        UnsupportedError, match=r"zentorch is missing.*'expert-as-a-service\[zentorch\]'"
    ):
        ZentorchKernel(FORMS, BFLOAT16)


def test_another_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    with pytest.raises(UnsupportedError, match="AVX-512"):
        ZentorchKernel(FORMS, BFLOAT16)


def test_quantised_weights_are_unsupported(avx512: None) -> None:
    with pytest.raises(UnsupportedError, match="int8"):
        ZentorchKernel(FORMS, KernelSpec(torch.bfloat16, Quantization.INT8))


@pytest.mark.skipif(find_spec("zentorch") is None, reason="zentorch is not installed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_another_expert_in_the_same_memory(dtype: torch.dtype) -> None:
    """Nothing is kept by address: what was computed with a freed expert does not come back."""
    try:
        kernel = ZentorchKernel(FORMS, KernelSpec(dtype))
    except UnsupportedError as error:
        pytest.skip(str(error))
    x_TH, ids_TK, scores_TK = (
        torch.ones(2, 64),
        torch.zeros(2, 1, dtype=torch.int32),
        torch.ones(2, 1),
    )
    weights = ExpertWeights(torch.empty(64, 64), torch.eye(64))
    for value in (1.0, 2.0, 3.0):
        weights.up.fill_(value)
        kernel.load(0, 0, weights)
        out_TH = kernel(x_TH, ids_TK, scores_TK, 0)
        assert torch.equal(out_TH, torch.full((2, 64), 64 * value))
        kernel.unload(0, 0)
    assert kernel.bytes == 0
