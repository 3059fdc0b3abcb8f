"""Kernel `triton` is chosen by name only, and imported nowhere else."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from eaas.checkpoint.quantized import WeightFormat
from eaas.errors import ConfigError
from expert_layers import FORMS
from expert_server.kernels import KernelSpec, StoredFormat, choose
from expert_server.kernels.choose import ExpertSizes, choose_kernel
from interpreted_triton import interpreted_kernel, needs_triton

SIZES = ExpertSizes(hidden=32, intermediate=16, num_experts=4, top_k=2)
FORM = FORMS["swiglu"]


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_tried_before_it_serves(dtype: torch.dtype) -> None:
    interpreted_kernel()
    choice = choose_kernel([FORM], KernelSpec(dtype), SIZES, "triton")
    assert (choice.kernel.name, choice.kernel.isa) == ("triton", "interpreted")
    assert choice.kernel.count == 0
    choice.kernel.close()


@needs_triton
def test_weights_that_it_lacks_are_refused_with_a_remedy() -> None:
    interpreted_kernel()
    spec = KernelSpec(torch.bfloat16, stored=StoredFormat(WeightFormat.INT4, 128))
    with pytest.raises(ConfigError, match=r"triton: .*fp8 and mxfp4\); give --kernel auto$"):
        choose_kernel([FORM], spec, SIZES, "triton")


def test_without_triton_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "find_spec", lambda _name: None)
    with pytest.raises(
        ConfigError, match=r"kernel triton: .*pip install 'expert-as-a-service\[triton\]'"
    ):
        choose_kernel([FORM], KernelSpec(torch.float32), SIZES, "triton")


PROGRAM = """
import sys
import torch
from torch.nn import functional
import attention_client.cluster, expert_server.main
from eaas.errors import ConfigError
from expert_server.kernels import KernelSpec
from expert_server.kernels.choose import ExpertSizes, choose_kernel
from expert_server.weights.weights import ExpertForm

form = ExpertForm(False, False, functional.relu)
sizes = ExpertSizes(32, 16, 4, 2)
choose_kernel([form], KernelSpec(torch.float32), sizes).kernel.close()
assert not {"triton", "expert_server.kernels.gpu"} & sys.modules.keys(), "not asked for"
torch.cuda.is_available = lambda: False
try:
    choose_kernel([form], KernelSpec(torch.float32), sizes, "triton")
except ConfigError as error:
    print(error)
"""


@needs_triton
def test_without_a_gpu_it_refuses_and_without_a_request_it_is_not_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=100,
        env=os.environ | {"TRITON_INTERPRET": "0"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    for words in ("expert_server.kernel triton", "there is no GPU", "give --kernel auto"):
        assert words in done.stdout
