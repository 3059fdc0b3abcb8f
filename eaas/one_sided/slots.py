"""What both ends of the nixl transport say of their slots, and to each other."""

from __future__ import annotations

import struct
from typing import NamedTuple

from eaas.one_sided.agent import Region
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.wire import Arena

__all__ = ["READY", "SlotMemory", "pack_note", "slots_span", "unpack_note"]

READY = b"ready"
"""The first note of either end: the way is there, and the peer's slots are known."""

_NOTE = struct.Struct("<IQ")


def pack_note(slot: int, length: int) -> bytes:
    """`length` bytes were written into a slot (its index within the connection)."""
    return _NOTE.pack(slot, length)


def unpack_note(note: bytes) -> tuple[int, int]:
    """Slot and length. Raises ValueError where the note is none."""
    if len(note) != _NOTE.size:
        raise ValueError(f"a note of {len(note)} bytes")
    slot, length = _NOTE.unpack(note)
    return slot, length


def slots_span(arena: Arena, first: int, slots: int) -> tuple[int, int]:
    """Where a connection's slots begin and end in the arena's buffer."""
    end = arena.result_offset(first + slots - 1) + arena.result_stride
    return arena.request_offset(first), end


class SlotMemory(NamedTuple):
    """Addresses of slots in one process, by index within the connection."""

    requests_at: int
    results_at: int
    stride: int

    @classmethod
    def of(cls, arena: Arena, region: Region) -> SlotMemory:
        """Of slots in this process; the region begins with the first one."""
        return cls(
            region.address,
            region.address + arena.request_stride,
            arena.request_stride + arena.result_stride,
        )

    @classmethod
    def read(cls, message: pb.SlotMemory) -> SlotMemory:
        """Of the peer's."""
        return cls(message.requests_at, message.results_at, message.stride)

    def message(self, region: Region) -> pb.SlotMemory:
        """For the peer, with the right to write there."""
        return pb.SlotMemory(
            description=region.description,
            requests_at=self.requests_at,
            results_at=self.results_at,
            stride=self.stride,
        )

    def request(self, slot: int) -> int:
        """Address of a slot's request header."""
        return self.requests_at + slot * self.stride

    def result(self, slot: int) -> int:
        """Address of a slot's result header."""
        return self.results_at + slot * self.stride
