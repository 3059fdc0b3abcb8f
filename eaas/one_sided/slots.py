"""Slot addresses and notes of the nixl transport, for client and server."""

from __future__ import annotations

import struct
from typing import NamedTuple

from eaas.one_sided.agent import Region
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.wire import Arena
from eaas.wire.slot import REQUEST_HEADER_BYTES, RESULT_HEADER_BYTES

__all__ = ["READY", "SlotMemory", "pack_note", "slot_spans", "unpack_note"]

READY = b"ready"
"""First note of each side: the sender is connected and has the addresses of the peer's slots."""

_NOTE = struct.Struct("<IQ")


def pack_note(slot: int, length: int) -> bytes:
    """Encode the note of a write: `length` bytes were written to a slot (index within the connection)."""
    return _NOTE.pack(slot, length)


def unpack_note(note: bytes) -> tuple[int, int]:
    """Decode a write's note into slot and length: these bytes have arrived. Raises ValueError if invalid."""
    if len(note) != _NOTE.size:
        raise ValueError(f"a note of {len(note)} bytes")
    slot, length = _NOTE.unpack(note)
    return slot, length


def slot_spans(
    arena: Arena, first: int, slots: int, payload_capacity: int, result_capacity: int
) -> list[tuple[int, int]]:
    """Return start and end of each request and each result of a connection's slots in the arena.

    Only these are registered for the peer: the rest of a slot may have no memory (`Arena.allocate`).
    """
    spans = []
    for slot in range(first, first + slots):
        request, result = arena.request_offset(slot), arena.result_offset(slot)
        spans.append((request, request + REQUEST_HEADER_BYTES + payload_capacity))
        spans.append((result, result + RESULT_HEADER_BYTES + result_capacity))
    return spans


class SlotMemory(NamedTuple):
    """Addresses of a connection's slots in one process, by index within the connection."""

    requests_at: int
    results_at: int
    stride: int

    @classmethod
    def of(cls, arena: Arena, region: Region) -> SlotMemory:
        """Make the addresses of this process's own slots; the region starts with the first slot."""
        return cls(
            region.address,
            region.address + arena.request_stride,
            arena.request_stride + arena.result_stride,
        )

    @classmethod
    def read(cls, message: pb.SlotMemory) -> SlotMemory:
        """Parse the peer's message with the addresses of its slots, the targets of this process's writes."""
        return cls(message.requests_at, message.results_at, message.stride)

    def message(self, region: Region) -> pb.SlotMemory:
        """Make the message for the peer with the slots' addresses and the right to write there."""
        return pb.SlotMemory(
            description=region.description,
            requests_at=self.requests_at,
            results_at=self.results_at,
            stride=self.stride,
        )

    def request(self, slot: int) -> int:
        """Address of a slot's request header. The client writes from its own copy into the server's."""
        return self.requests_at + slot * self.stride

    def result(self, slot: int) -> int:
        """Address of a slot's result header. The server writes from its own copy into the client's."""
        return self.results_at + slot * self.stride
