"""Sizes that client and server share without a checkpoint."""

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


def model_shape(hidden: int, num_experts: int, top_k: int) -> ModelShape:
    """A model of one MoE layer."""
    return ModelShape("bench", num_experts, hidden, top_k, ("layer",), "bfloat16", "bench dispatch")


def request_bytes(plan: Plan, hidden: int, tokens: int) -> int:
    """Header and payload of a request."""
    layout = payload_layout(tokens, hidden, plan.top_k, WireDtype.BFLOAT16)
    return REQUEST_HEADER_BYTES + layout.total


def result_bytes(hidden: int, tokens: int) -> int:
    """Header and payload of a result."""
    return RESULT_HEADER_BYTES + result_length(tokens, hidden)
