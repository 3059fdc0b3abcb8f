"""Default cost of moving an expert."""

from __future__ import annotations

__all__ = ["EXPERT_BYTES", "LINK_BYTES_PER_S"]

EXPERT_BYTES = 88_080_384
"""DeepSeek-R1's in bfloat16: 3 x 7168 x 2048 x 2 bytes."""

LINK_BYTES_PER_S = 9e11
