"""What a kernel computes with, for the experts of a checkpoint."""

from __future__ import annotations

import torch

from eaas.checkpoint.formats import StoredFormat
from eaas.errors import ConfigError
from expert_server.kernels.kernel import KernelSpec, Quantization
from expert_server.kernels.panels import is_decoded
from expert_server.weights.reader import ExpertReader

__all__ = ["compute_dtype", "spec_of"]


def spec_of(
    reader: ExpertReader, threads: int, quantization: str = Quantization.NONE
) -> KernelSpec:
    """Return the spec of a kernel for these experts.

    Args:
        reader: Reads the experts.
        threads: Intra-op threads.
        quantization: Format to quantise float weights to (`expert_server.quantization`).

    Raises:
        ConfigError: The experts are quantised already.
    """
    if reader.stored is not None and quantization != Quantization.NONE:
        raise ConfigError(
            f"expert_server.quantization {quantization}: the checkpoint is quantised, its experts are "
            f"{reader.stored}: leave it out"
        )
    dtype = compute_dtype(reader.dtype, reader.stored)
    return KernelSpec(dtype, Quantization(quantization), threads, reader.stored)


def compute_dtype(dtype: torch.dtype, stored: StoredFormat | None) -> torch.dtype:
    """Choose the dtype that the kernel computes with, for a checkpoint of this dtype.

    float16 becomes float32, which holds all of its values. Few CPUs multiply float16 fast, and bfloat16 would
    drop three of its eleven bits. float32 takes twice the memory, unless the weights are quantised. Beside
    integers, bfloat16 allows activations of 15 bits, more than float16 has.
    """
    if dtype is not torch.float16:
        return dtype
    is_integer = stored is not None and stored.format.is_integer and is_decoded(stored.format)
    return torch.bfloat16 if is_integer else torch.float32
