"""What an expert server has counted."""

from __future__ import annotations

import numpy as np

from eaas.net.grpc_client import channel
from eaas.rpc.v1 import expert_pb2, expert_pb2_grpc

__all__ = ["tokens_LE"]


def tokens_LE(address: str) -> np.ndarray:
    """Tokens that a server has computed since its start: int64 (L, E)."""
    with channel(address) as line:
        stub = expert_pb2_grpc.ExpertServiceStub(line)
        answer = stub.ReadHotness(expert_pb2.ReadHotnessRequest(), timeout=10)
    return np.array([layer.tokens for layer in answer.layers], np.int64)
