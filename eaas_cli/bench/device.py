"""Option --device of benchmarks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eaas.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = ["DEVICES", "find_gpu"]

DEVICES = ("cpu", "cuda")


def find_gpu() -> torch.device:
    """Return the GPU that torch uses. Raises ConfigError: it finds none."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: torch finds no GPU here; install a build of torch with CUDA on a machine "
            "that has one, or leave the option out"
        )
    return torch.device("cuda", torch.cuda.current_device())
