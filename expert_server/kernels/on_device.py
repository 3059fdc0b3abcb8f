"""Settings of an expert server: which kernel they mean, and which values contradict each other.

Asks for a GPU, and looks for Triton, only where the settings name a GPU.
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch

from eaas.counted import counted
from eaas.errors import ConfigError

__all__ = ["CPU", "check_gpu", "is_interpreted", "kernel_on"]

CPU = "cpu"
_TRITON = "triton"
# As Triton reads it.
_TRUE = ("1", "true", "yes", "on", "y")


def is_interpreted() -> bool:
    """Whether TRITON_INTERPRET makes the CPU stand in for a GPU, for tests; does not import Triton."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in _TRUE


def kernel_on(device: str, kernel: str) -> str:
    """Return the kernel that a server uses: `auto` on a GPU is `triton`.

    Args:
        device: `expert_server.device`: cpu, cuda or cuda:N.
        kernel: `expert_server.kernel`.

    Raises:
        ConfigError: The two contradict each other, Triton is not installed, or there is no such GPU.
    """
    if device == CPU and kernel != _TRITON:
        return kernel
    if kernel not in ("auto", _TRITON):
        raise ConfigError(
            f"expert_server.kernel {kernel} computes on the CPU, but expert_server.device is {device}: give "
            "--kernel auto or --device cpu"
        )
    if device == CPU and not is_interpreted():
        raise ConfigError(
            "expert_server.kernel triton computes on a GPU, but expert_server.device is cpu: give "
            "--device cuda or --kernel auto"
        )
    if find_spec(_TRITON) is None:
        raise ConfigError(
            "expert_server.kernel triton: Triton is not installed: pip install "
            "'expert-as-a-service[triton]', or give --kernel auto --device cpu"
        )
    if not is_interpreted():
        check_gpu(device)
    return _TRITON


def check_gpu(device: str) -> None:
    """Check that this process can compute on a GPU, cuda or cuda:N.

    Raises:
        ConfigError: torch is a build without CUDA, or sees no such GPU.
    """
    what = f"expert_server.device {device}"
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        raise ConfigError(
            f"{what}: torch {torch.__version__} is a build without CUDA: install one with CUDA, or give "
            "--device cpu"
        )
    count = torch.cuda.device_count()
    if not count:
        raise ConfigError(
            f"{what}: torch sees no GPU: check `nvidia-smi` and CUDA_VISIBLE_DEVICES, or give --device cpu"
        )
    _, _, number = device.partition(":")
    if number and int(number) >= count:
        names = "cuda:0" if count == 1 else f"cuda:0 to cuda:{count - 1}"
        raise ConfigError(
            f"{what}: torch sees {counted(count, 'GPU')}: give {names}, or check CUDA_VISIBLE_DEVICES"
        )
