"""The formats to compare: of checkpoints, and those that an expert server makes while it loads."""

from __future__ import annotations

from typing import NamedTuple

import torch

from benchmarks.quality.quantized_checkpoint import SCHEMES, Packed, Scheme
from expert_server.kernels.kernel import Quantization
from expert_server.kernels.quantize import quantize

__all__ = ["BASELINE", "FORMATS", "Format"]

BASELINE = "bf16"


class Format(NamedTuple):
    """How a copy of the checkpoint is stored, and what the expert servers do with it.

    Attributes:
        scheme: Makes the copy.
        quantization: `expert_server.quantization`.
    """

    scheme: Scheme
    quantization: Quantization = Quantization.NONE


def _as_it_is(weight_NK: torch.Tensor) -> Packed:
    return Packed({"weight": weight_NK}, weight_NK)


def _while_loading(quantization: Quantization) -> Format:
    def pack(weight_NK: torch.Tensor) -> Packed:
        return Packed({"weight": weight_NK}, quantize(weight_NK, quantization).dequantize())

    return Format(Scheme({}, pack, experts_only=True), quantization)


FORMATS = {
    BASELINE: Format(Scheme({}, _as_it_is)),
    "int8": _while_loading(Quantization.INT8),
    "int4": _while_loading(Quantization.INT4),
    **{name: Format(scheme) for name, scheme in SCHEMES.items()},
}
