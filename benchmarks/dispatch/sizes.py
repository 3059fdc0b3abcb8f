"""Model shape and message sizes that the benchmark's client and server share."""

from __future__ import annotations

from benchmarks.dispatch.plan import Plan
from eaas.types import ModelShape
from eaas.wire.header import (
    REQUEST_HEADER_BYTES,
    RESULT_HEADER_BYTES,
    WireDtype,
    payload_layout,
    result_length,
)

__all__ = ["model_shape", "request_bytes", "result_bytes"]


def model_shape(hidden: int, num_experts: int, top_k: int, layers: int = 1) -> ModelShape:
    """Shape of a model with so many equal MoE layers."""
    names = tuple(f"layer {layer}" for layer in range(layers))
    return ModelShape("bench", num_experts, hidden, top_k, names, "bfloat16", "bench dispatch")


def request_bytes(plan: Plan, hidden: int, tokens: int) -> int:
    """Bytes of a request in a slot: header and payload."""
    layout = payload_layout(tokens, hidden, plan.top_k, WireDtype.BFLOAT16)
    return REQUEST_HEADER_BYTES + layout.total


def result_bytes(hidden: int, tokens: int) -> int:
    """Bytes of a result in a slot: header and payload."""
    return RESULT_HEADER_BYTES + result_length(tokens, hidden)
