"""What callers of an expert server know beside `expert.proto`."""

from __future__ import annotations

__all__ = ["MISMATCH_KEY"]

MISMATCH_KEY = "eaas-wrong-expert"
"""In the trailing metadata of a PreparePlacement that fails with DATA_LOSS: the bytes of an expert differ
from those of the cluster's other replicas. Another attempt of the same process fails, too."""
