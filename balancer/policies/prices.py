"""Default cost of moving an expert, for `fractional` and the simulator; the balancer gives its own."""

from __future__ import annotations

__all__ = ["EXPERT_BYTES", "LINK_BYTES_PER_S"]

EXPERT_BYTES = 88_080_384
"""Bytes of one of DeepSeek-R1's experts in bfloat16: 3 x 7168 x 2048 x 2."""

LINK_BYTES_PER_S = 9e11
