"""The least time that a batch can take: to read the weights that it needs, or to multiply with them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eaas.bench.experts.plan import Shape

__all__ = ["Limit", "Speed", "limit", "stored_bytes"]

_WEIGHT_BYTES = {"bfloat16": 2.0, "float32": 4.0, "int8": 1.0, "int4": 0.5}
_SCALE_BYTES = 4
_INT4_GROUP = 128


@dataclass(frozen=True)
class Speed:
    """What the machine gave at one moment.

    Attributes:
        read: Bytes/s from memory.
        multiply: FLOP/s of a product of matrices.
    """

    read: float
    multiply: float


@dataclass(frozen=True)
class Limit:
    """Seconds that no implementation can be below: the longer of the two."""

    memory_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        """The limit."""
        return max(self.memory_s, self.compute_s)

    @property
    def bound(self) -> Literal["memory", "compute"]:
        """What sets it."""
        return "memory" if self.memory_s >= self.compute_s else "compute"


def stored_bytes(shape: Shape, dtype: str) -> int:
    """One expert's weights as they are stored, scales included, nothing padded."""
    outputs = 2 * shape.intermediate + shape.hidden
    scales = {
        "int8": outputs,
        "int4": 2 * shape.intermediate * -(-shape.hidden // _INT4_GROUP)
        + shape.hidden * -(-shape.intermediate // _INT4_GROUP),
    }
    return int(shape.expert_size * _WEIGHT_BYTES[dtype]) + _SCALE_BYTES * scales.get(dtype, 0)


def limit(shape: Shape, dtype: str, tokens: int, active: float, speed: Speed) -> Limit:
    """The roofline of one call. Activations are not counted: what is left out makes the limit lower.

    Args:
        shape: Of the layer.
        dtype: Of the weights as they are stored.
        tokens: T; each goes to `top_k` experts.
        active: Experts with at least one token.
        speed: The machine's.
    """
    flops = 2 * shape.expert_size * tokens * shape.top_k
    return Limit(active * stored_bytes(shape, dtype) / speed.read, flops / speed.multiply)
