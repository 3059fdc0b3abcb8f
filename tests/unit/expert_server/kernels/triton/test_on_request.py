"""Kernel `triton` is chosen by name or for a GPU only, and imported nowhere else."""

import os
import sys

import pytest
import torch

from eaas.checkpoint.quantized import INT4
from eaas.errors import ConfigError
from expert_layers import FORMS
from expert_server.kernels import KernelSpec, StoredFormat
from expert_server.kernels.choose import ExpertSizes, choose_kernel
from helper_process import output_of
from interpreted_triton import interpreted_kernel, needs_triton

SIZES = ExpertSizes(hidden=32, intermediate=16, num_experts=4, top_k=2)
FORM = FORMS["swiglu"]


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_is_tried_before_it_serves(dtype: torch.dtype) -> None:
    interpreted_kernel()
    for device, wanted in (("cpu", "triton"), ("cuda:1", "auto"), ("cuda", "triton")):
        choice = choose_kernel([FORM], KernelSpec(dtype), SIZES, wanted, device)
        assert (choice.kernel.name, choice.kernel.isa) == ("triton", "interpreted")
        assert choice.kernel.count == 0
        choice.kernel.close()


@needs_triton
def test_weights_that_it_lacks_are_refused_with_a_remedy() -> None:
    interpreted_kernel()
    spec = KernelSpec(torch.bfloat16, stored=StoredFormat(INT4, 128))
    with pytest.raises(ConfigError, match=r"triton: .*fp8 and mxfp4\); give --kernel auto$"):
        choose_kernel([FORM], spec, SIZES, "triton")
    with pytest.raises(ConfigError, match=r"triton: .*fp8 and mxfp4\); give --device cpu$"):
        choose_kernel([FORM], spec, SIZES, device="cuda")


PROGRAM = """
import importlib
import sys
import torch
from torch.nn import functional
from eaas_cli.local.fork_server import CLIENT_MODULES, CONTROL_MODULES, SERVER_MODULES

def refuse(*_):
    raise AssertionError("a GPU is asked for")

# What a driver has begun does not work in forked processes.
for place, name in (
    (torch.cuda, "_lazy_init"),
    (torch.cuda, "is_available"),
    (torch.cuda, "device_count"),
    (torch._C, "_cuda_getDeviceCount"),
    (torch._C, "_cuda_init"),
):
    if hasattr(place, name):
        setattr(place, name, refuse)
for module in CONTROL_MODULES + SERVER_MODULES + CLIENT_MODULES:
    importlib.import_module(module)
from eaas.errors import ConfigError
from expert_server.kernels import KernelSpec
from expert_server.kernels.choose import ExpertSizes, choose_kernel
from expert_server.weights.weights import ExpertForm

form = ExpertForm(False, False, functional.relu)
sizes = ExpertSizes(32, 16, 4, 2)
choose_kernel([form], KernelSpec(torch.float32), sizes).kernel.close()
assert not any(name.startswith("expert_server.kernels.gpu") for name in sys.modules), "not asked for"
try:
    choose_kernel([form], KernelSpec(torch.float32), sizes, "triton")
except ConfigError as error:
    print(error)
"""


def test_the_fork_server_asks_for_no_gpu_and_without_a_request_the_kernel_is_not_imported() -> None:
    printed = output_of(sys.executable, "-c", PROGRAM, env=os.environ | {"TRITON_INTERPRET": "0"})
    assert printed.count("\n") == 1
    for words in ("expert_server.kernel triton", "expert_server.device is cpu", "--device cuda"):
        assert words in printed
