"""The server's end of the grpc transport: copies slots into the arena and results out of it, nothing else.

To the loop it is one more client: it moves flags the way a client on the same host would. A stream lives as
long as its grant: whichever ends first ends the other.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc

from eaas.log import get_logger
from eaas.rpc.v1 import expert_pb2 as pb
from eaas.wire import Arena, RequestHeader, ResultHeader, SlotState
from eaas.wire.slot import DOORBELL, REQUEST_HEADER_BYTES
from expert_server.slots import Grant, SlotTable

__all__ = ["exchange"]

_log = get_logger(__name__)
_ANSWERED = SlotState.DONE.mask | SlotState.OFFLINE.mask
# Answers and the end of the grant wake the stream at once; this only bounds one wait.
_IDLE_US = 60_000_000


def exchange(
    arena: Arena,
    table: SlotTable,
    requests: Iterator[pb.ExchangeRequest],
    context: grpc.ServicerContext,
) -> Iterator[pb.ExchangeResponse]:
    """Serve one connection's stream until either side ends it; its slots are given back then.

    Ends with FAILED_PRECONDITION where the connection is not known (any more), and with INVALID_ARGUMENT
    after a frame that does not fit its slot.
    """
    hello = next(requests, None)
    grant = table.get(hello.connection_id) if hello is not None else None
    if grant is None:
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "unknown connection: connect first")
        return
    refusals: list[str] = []
    threading.Thread(
        target=_read, args=(arena, table, grant, requests, refusals), name="exchange", daemon=True
    ).start()
    # gRPC may drop this generator where it stands when the client is gone: hence the callback, too.
    if context.add_callback(lambda: table.revoke(grant.connection_id)):
        yield from _answers(arena, table, grant)
    table.revoke(grant.connection_id)
    if refusals:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, refusals[0])
    context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the connection is over")


def _read(
    arena: Arena,
    table: SlotTable,
    grant: Grant,
    requests: Iterator[pb.ExchangeRequest],
    refusals: list[str],
) -> None:
    try:
        for request in requests:
            refusal = _write(arena, table, grant, request)
            if refusal:
                _log.warning("%s: connection ended: %s", grant.client_id, refusal)
                refusals.append(refusal)
                return
    except grpc.RpcError as error:
        _log.debug("%s: stream ended: %s", grant.client_id, error)
    finally:
        table.revoke(grant.connection_id)


def _write(arena: Arena, table: SlotTable, grant: Grant, request: pb.ExchangeRequest) -> str:
    """Put a frame into its slot. Returns why not; empty where all is well."""
    data = request.data
    room = REQUEST_HEADER_BYTES + arena.payload_capacity
    if request.slot >= grant.slots or not REQUEST_HEADER_BYTES <= len(data) <= room:
        return f"slot {request.slot} of {grant.slots}, {len(data)} bytes of {room}"
    # A short frame would leave the end of somebody's earlier payload to be computed with.
    wanted = RequestHeader.unpack_from(data, 0).end
    if wanted != len(data):
        return f"{len(data)} bytes where the header says {wanted}"
    slot = grant.first_slot + request.slot
    with table.copying(grant) as lives:
        if not lives:
            return ""  # The answering side sees it, too, and ends the stream.
        if arena.flags.load(slot) != SlotState.FREE:
            return f"slot {request.slot} is not free"
        offset = arena.request_offset(slot)
        arena.buffer[offset : offset + len(data)] = data
        if arena.client_write_done(slot):
            arena.flags.ring(DOORBELL)
    return ""


def _answers(arena: Arena, table: SlotTable, grant: Grant) -> Iterator[pb.ExchangeResponse]:
    """What the loop wrote, slot by slot, until the grant is revoked."""
    flags = arena.flags
    while True:
        seen = flags.seq(grant.reply_bell)
        with table.copying(grant) as lives:
            if not lives:
                return
            responses = _take(arena, grant)
        if responses:
            yield from responses
            continue
        flags.wait(grant.first_slot, grant.slots, _ANSWERED, grant.reply_bell, seen, 0, _IDLE_US)


def _take(arena: Arena, grant: Grant) -> list[pb.ExchangeResponse]:
    """Copy the answers that are there, and free their slots."""
    responses = []
    for slot in arena.flags.scan(grant.first_slot, grant.slots, SlotState.DONE.mask):
        offset = arena.result_offset(slot)
        header = ResultHeader.unpack_from(arena.buffer, offset)
        data = arena.buffer[offset : offset + header.end]
        # Free before the answer leaves: the client may send into this slot as soon as it has it.
        if arena.client_free(slot):
            responses.append(pb.ExchangeResponse(slot=slot - grant.first_slot, data=data))
    return responses
