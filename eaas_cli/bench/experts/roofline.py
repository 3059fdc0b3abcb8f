"""The roofline of one layer call: the longer of the times to read the weights and to multiply."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eaas_cli.bench.experts.plan import Shape

__all__ = ["Limit", "Speed", "limit", "stored_bytes"]

# Of checkpoints' formats with their scales: float32 for 128 x 128 weights, and 8 or 16 bits for 32.
_WEIGHT_BYTES = {
    "bfloat16": 2.0,
    "float32": 4.0,
    "int8": 1.0,
    "int4": 0.5,
    "fp8": 1 + 4 / 128**2,
    "mxfp4": 0.5 + 1 / 32,
    "int4-g32": 0.5 + 2 / 32,
}
_SCALE_BYTES = 4
_INT4_GROUP = 128


@dataclass(frozen=True)
class Speed:
    """Speed of the machine at one moment, from which `limit` computes the roofline.

    Attributes:
        read: Bytes/s from memory.
        multiply: FLOP/s of a matrix product.
    """

    read: float
    multiply: float


@dataclass(frozen=True)
class Limit:
    """Lower bounds of the time of one layer call, in seconds: to read the weights, and to multiply."""

    memory_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        """The larger of the two bounds, in seconds: no call of the layer can be faster."""
        return max(self.memory_s, self.compute_s)

    @property
    def bound(self) -> Literal["memory", "compute"]:
        """The resource that sets the larger bound, for column `bound` of the report."""
        return "memory" if self.memory_s >= self.compute_s else "compute"


def stored_bytes(shape: Shape, dtype: str) -> int:
    """Stored bytes of one expert, with scales, without padding: what a call reads of each active expert."""
    outputs = 2 * shape.intermediate + shape.hidden
    scales = {
        "int8": outputs,
        "int4": 2 * shape.intermediate * -(-shape.hidden // _INT4_GROUP)
        + shape.hidden * -(-shape.intermediate // _INT4_GROUP),
    }
    return int(shape.expert_size * _WEIGHT_BYTES[dtype]) + _SCALE_BYTES * scales.get(dtype, 0)


def limit(shape: Shape, dtype: str, tokens: int, active: float, speed: Speed) -> Limit:
    """Compute the roofline of one layer call. Activations are not counted.

    Args:
        tokens: T; each goes to `top_k` experts.
        active: Experts with at least one token.
        speed: Speed of the machine.
    """
    flops = 2 * shape.expert_size * tokens * shape.top_k
    return Limit(active * stored_bytes(shape, dtype) / speed.read, flops / speed.multiply)
