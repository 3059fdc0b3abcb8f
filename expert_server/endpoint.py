"""The server's end of the grpc transport: copies slots into the arena and results out of it, nothing else.

To the loop it is one more client: it moves flags the way a client on the same host would.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc

from eaas.log import get_logger
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.wire import Arena, ResultHeader, SlotState
from eaas.wire.slot import DOORBELL, REQUEST_HEADER_BYTES
from expert_server.slots import Grant, SlotTable

__all__ = ["exchange"]

_log = get_logger(__name__)
_ANSWERED = SlotState.DONE.mask | SlotState.OFFLINE.mask
# Only bounds how late a broken stream is noticed; answers and the end of the stream wake it.
_IDLE_US = 1_000_000


def exchange(
    arena: Arena, table: SlotTable, requests: Iterator[pb.ExchangeRequest], context: grpc.ServicerContext
) -> Iterator[pb.ExchangeResponse]:
    """Serve one connection's stream until either side ends it; its slots are given back then."""
    hello = next(requests, None)
    grant = table.get(hello.connection_id) if hello is not None else None
    if grant is None:
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "unknown connection: connect first")
        return
    ended = threading.Event()
    reader = threading.Thread(
        target=_read, args=(arena, grant, requests, ended), name="exchange", daemon=True
    )
    reader.start()
    try:
        yield from _answers(arena, table, grant, ended, context)
    finally:
        table.revoke(grant.connection_id)


def _read(
    arena: Arena, grant: Grant, requests: Iterator[pb.ExchangeRequest], ended: threading.Event
) -> None:
    try:
        for request in requests:
            if not _write(arena, grant, request):
                _log.warning("%s: wrong frame, connection ended", grant.client_id)
                return
    except grpc.RpcError as error:
        _log.debug("%s: stream ended: %s", grant.client_id, error)
    finally:
        ended.set()
        arena.flags.interrupt(grant.reply_bell)


def _write(arena: Arena, grant: Grant, request: pb.ExchangeRequest) -> bool:
    """Put a frame into its slot; False where it does not fit or the slot is not free."""
    data = request.data
    room = REQUEST_HEADER_BYTES + arena.payload_capacity
    if request.slot >= grant.slots or not REQUEST_HEADER_BYTES <= len(data) <= room:
        return False
    slot = grant.first_slot + request.slot
    if arena.flags.load(slot) != SlotState.FREE:
        return False
    offset = arena.request_offset(slot)
    arena.buffer[offset : offset + len(data)] = data
    if not arena.client_write_done(slot):
        return False
    arena.flags.ring(DOORBELL)
    return True


def _answers(
    arena: Arena,
    table: SlotTable,
    grant: Grant,
    ended: threading.Event,
    context: grpc.ServicerContext,
) -> Iterator[pb.ExchangeResponse]:
    flags = arena.flags
    while not ended.is_set() and context.is_active():
        seen = flags.seq(grant.reply_bell)
        if table.get(grant.connection_id) is None:
            return
        ready = flags.wait(
            grant.first_slot, grant.slots, _ANSWERED, grant.reply_bell, seen, 0, _IDLE_US
        )
        for slot in ready:
            offset = arena.result_offset(slot)
            header = ResultHeader.unpack_from(arena.buffer, offset)
            data = arena.buffer[offset : offset + header.end]
            # Free before the answer leaves: the client may send into this slot as soon as it has it.
            if arena.client_free(slot):
                yield pb.ExchangeResponse(slot=slot - grant.first_slot, data=data)
