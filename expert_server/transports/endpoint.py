"""The expert server's end of a transport, and what transports that copy slots have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from mmap import mmap
from typing import Any

import grpc

from eaas.wire import Arena, RequestHeader, ResultHeader, SlotState
from eaas.wire.frame import paste
from eaas.wire.slot import DOORBELL, REQUEST_HEADER_BYTES
from expert_server.transports.slot_ownership import Grant, SlotTable

__all__ = ["Endpoint", "collect_answers", "copy_answers", "copy_request"]

_ANSWERED = SlotState.DONE.mask | SlotState.OFFLINE.mask
# Longest sleep of a connection without answers. Answers and the end of the grant wake it at once.
_IDLE_US = 60_000_000


class Endpoint:
    """The server's end of a transport: by default one that needs nothing.

    To the loop it is one more client: it writes requests into granted slots and takes answers out of them.

    Args:
        arena: The server's arena.
        table: Slot ownership.
    """

    def __init__(self, arena: Arena, table: SlotTable) -> None:
        self._arena = arena
        self._table = table

    def handlers(self) -> Sequence[grpc.GenericRpcHandler]:
        """Return the handlers of the gRPC methods that the transport uses."""
        return ()

    def describe(self) -> dict[str, Any]:
        """Return fields of ConnectResponse that the client's end needs beside the grant, such as `hello`."""
        return {}

    def supersede(self, client_id: str, incarnation: int) -> None:
        """End the former connections of a client that connects again, before it gets new slots."""

    def leave(self, connection_id: str) -> None:
        """End the connection of a client that disconnects and writes no more."""

    def close(self) -> None:
        """End all connections and threads, before the arena is closed. Idempotent."""


def copy_request(arena: Arena, table: SlotTable, grant: Grant, index: int, data: memoryview) -> str:
    """Copy a client's request into its slot, and wake the loop.

    Args:
        arena: The server's arena.
        table: Slot ownership.
        grant: The client's grant.
        index: The slot's index in the grant.
        data: Header and payload.

    Returns:
        Why the request does not fit, which must end the connection; an empty string if it does. A request
        of a revoked grant is dropped.
    """
    capacity = REQUEST_HEADER_BYTES + grant.payload_capacity
    if index >= grant.slots or not REQUEST_HEADER_BYTES <= len(data) <= capacity:
        return f"slot {index} of {grant.slots}, {len(data)} bytes of {capacity}"
    # After a short request, the loop would compute with the end of an earlier payload.
    wanted = RequestHeader.unpack_from(data, 0).end
    if wanted != len(data):
        return f"{len(data)} bytes where the header says {wanted}"
    slot = grant.first_slot + index
    with table.copying(grant) as valid:
        if not valid:
            return ""  # `copy_answers` also notices this and ends.
        if arena.flags.load(slot) != SlotState.FREE:
            return f"slot {index} is not free"
        paste(arena.buffer, arena.request_offset(slot), data)
        if arena.client_write_done(slot):
            arena.flags.ring(DOORBELL)
    return ""


def collect_answers(
    arena: Arena, grant: Grant, encode: Callable[[int, mmap, int, int], bytes]
) -> list[bytes]:
    """Copy the answers that are there, and free their slots, as `copy_answers` does."""
    answers = []
    for slot in arena.flags.scan(grant.first_slot, grant.slots, SlotState.DONE.mask):
        offset = arena.result_offset(slot)
        end = offset + ResultHeader.unpack_from(arena.buffer, offset).end
        answer = encode(slot - grant.first_slot, arena.buffer, offset, end)
        # Free before the answer is sent, because the client may use this slot once it has the answer.
        if arena.client_free(slot):
            answers.append(answer)
    return answers


def copy_answers(
    arena: Arena, table: SlotTable, grant: Grant, encode: Callable[[int, mmap, int, int], bytes]
) -> Iterator[bytes]:
    """Yield the answers to a client as they come, for sending, until the grant is revoked.

    Args:
        arena: The server's arena.
        table: Slot ownership.
        grant: The client's grant.
        encode: Copies an answer, header and result: (index in the grant, buffer, start, end) -> bytes.
    """
    flags = arena.flags
    while True:
        seen = flags.seq(grant.reply_doorbell)
        with table.copying(grant) as valid:
            if not valid:
                return
            answers = collect_answers(arena, grant, encode)
        if answers:
            yield from answers
        else:
            flags.wait(
                grant.first_slot, grant.slots, _ANSWERED, grant.reply_doorbell, seen, 0, _IDLE_US
            )
