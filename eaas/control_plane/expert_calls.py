"""Constants of gRPC calls to expert servers, in addition to `expert.proto`."""

from __future__ import annotations

__all__ = ["MISMATCH_KEY"]

MISMATCH_KEY = "eaas-wrong-expert"
"""Trailing metadata of a PreparePlacement that fails with DATA_LOSS: an expert's bytes differ from those of
other replicas. A retry by the same process also fails."""
