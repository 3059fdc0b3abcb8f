"""The client's own arena, for transports that copy slots."""

from __future__ import annotations

from eaas.rpc.v1 import expert_pb2 as pb
from eaas.wire import Arena

__all__ = ["mirror_arena"]


def mirror_arena(granted: pb.ConnectResponse, most_bytes: int | None = None) -> Arena:
    """Make an arena in private memory with the granted slots, numbered from 0, and their generation.

    Args:
        granted: The server's answer.
        most_bytes: Largest payload or result that the transport carries; None: no limit.
    """
    payload, result = granted.payload_capacity, granted.result_capacity
    if most_bytes is not None:
        payload, result = min(payload, most_bytes), min(result, most_bytes)
    arena = Arena.create_local(granted.slots, payload, result, granted.server_incarnation)
    for slot in range(granted.slots):
        arena.set_generation(slot, granted.generation)
    return arena
