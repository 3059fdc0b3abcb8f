"""The slot: its bytes, its states, and the checks that come before any view of it.

One slot (all little-endian; every section starts at a multiple of 64 bytes):

    request_offset(i) -> +-----------------------------------------------+
                         | request header                      128 bytes |  written by the client
                         +-----------------------------------------------+
                         | hidden states  (T, H)  dtype of the header    |
                         | expert ids     (T, K)  int32, -1: none here   |  at most payload_capacity
                         | scores         (T, K)  float32                |
    result_offset(i) --> +-----------------------------------------------+
                         | result header                        64 bytes |  written by the server
                         +-----------------------------------------------+
                         | result         (T, H)  float32                |  at most result_capacity
                         +-----------------------------------------------+

Request header                                 Result header
     0  magic            u32                       0  magic            u32
     4  version          u16                       4  version          u16
     6  dtype            u8   WireDtype            6  status           u16  Status
     7  flags            u8   bit 0: checksum
     8  generation       u32                       8  generation       u32
    12  checksum         u32  CRC-32, or 0        12  checksum         u32  CRC-32, or 0
    16  request_id       u64                      16  request_id       u64
    24  epoch            u64                      24  rows             u32  T
    32  payload_length   u64                      28  hidden_size      u32  H
    40  budget_us        u64                      32  length           u64
    48  layer            u32                      40  detail           u64
    52  batch_size       u32  T                   48  service_us       u64
    56  hidden_size      u32  H                   56  zeros
    60  top_k            u32  K
    64  trace            16 + 8 bytes, or zeros
    88  zeros

The flag of a slot is not in the slot but on a 64-byte line of its own (see `eaas.wire.arena`):

    state     | value | who moves it on              | by                  | to
    ----------+-------+------------------------------+---------------------+---------
    FREE      | 0     | the client has a request     | CLIENT_WRITE_DONE   | WRITTEN
    WRITTEN   | 1     | the server wrote the result  | SERVER_DONE         | DONE
    DONE      | 2     | the client read the result   | CLIENT_FREE         | FREE
    any       |       | the server: client is gone   | SERVER_OFFLINE      | OFFLINE
    OFFLINE   | 3     | the server: a new connection | SERVER_RECLAIM      | FREE

Results are float32 whatever the request's dtype: partial sums of several servers are added in
float32, so that how replicas group a token's experts does not change a bfloat16 result.

The checksum is optional: CHECKSUM_FLAG says that there is one, `seal` makes it and `verify` checks it. It
covers header and payload (or result) without its own four bytes. It is a CRC-32, which finds every single
flipped bit for certain, and other damage (a torn write, a flag that was seen before its data) but for one
case in 2^32. ISA-L computes it, at tens of gigabytes a second.

It is no defence against the peer. Both map the same memory, as the same user: a client can change a payload
after it was verified, while the server computes with it. Then its own rows are wrong, and nothing else is: a
header is read once, and that copy is judged and believed; kernels read each expert id once; no row of a
batch depends on another one.

The trace of a request is the context of the client's span (trace id and span id, as in W3C's traceparent),
where the request is traced. Nothing depends on it: a server that knows no traces never reads it.

Letters: T tokens (batch size), H hidden size, K experts per token (top-k).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

from eaas.errors import SlotCorruptError, WrongRequestError
from eaas.wire.header import (
    CHECKSUM_FLAG,
    DAMAGED,
    MAGIC,
    REQUEST_HEADER_BYTES,
    RESULT_HEADER_BYTES,
    TRACE_BYTES,
    TRACE_OFFSET,
    VERSION,
    PayloadLayout,
    RequestHeader,
    ResultHeader,
    Status,
    WireDtype,
    align,
    max_tokens,
    payload_layout,
    result_length,
)
from eaas.wire.states import TRANSITIONS, Action, SlotState, next_state

if TYPE_CHECKING:
    from mmap import mmap

    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = [
    "CHECKSUM_FLAG",
    "DAMAGED",
    "DOORBELL",
    "MAGIC",
    "REQUEST_HEADER_BYTES",
    "RESULT_HEADER_BYTES",
    "TRANSITIONS",
    "VERSION",
    "Action",
    "PayloadLayout",
    "RequestHeader",
    "ResultHeader",
    "SlotLimits",
    "SlotState",
    "Status",
    "WireDtype",
    "align",
    "max_tokens",
    "next_state",
    "payload_layout",
    "read_trace",
    "reply_bell",
    "request_views",
    "result_view",
    "seal",
    "validate_request",
    "validate_result",
    "verify",
    "write_trace",
]

DOORBELL = 0
"""The bell that clients ring for the server."""


def reply_bell(first_slot: int) -> int:
    """The bell that the server rings for the connection whose first slot this is."""
    return 1 + first_slot


# -- checks: none of them trusts a field, and Python's integers do not overflow -------------------


class SlotLimits(NamedTuple):
    """What a server can take.

    Attributes:
        payload_capacity: Bytes of a request's payload that fit a slot.
        result_capacity: Bytes of a result that fit a slot.
        hidden_size: H of the model.
        num_layers: MoE layers of the model.
    """

    payload_capacity: int
    result_capacity: int
    hidden_size: int
    num_layers: int


def validate_request(
    buffer: mmap | bytearray,
    offset: int,
    header: RequestHeader,
    limits: SlotLimits,
    generation: int,
) -> None:
    """Says whether views of this request may be made; call it before `request_views`.

    A request with a checksum is verified before anything in it is judged: a flipped bit must not pass for
    the client's mistake. The expert ids are data, not header: who uses them checks them.

    Args:
        buffer: The arena's bytes.
        offset: Where the request header stands.
        header: What was read there. The memory may say something else by now; this is what counts.
        limits: The server's.
        generation: The connection's.

    Raises:
        SlotCorruptError: Magic, version, flags, generation or checksum are wrong, or the lengths do
            not agree with one another or with the slot's capacities.
        WrongRequestError: Whole, but nothing that this server can compute.
    """
    _validate_common(header, generation)
    if header.flags & ~CHECKSUM_FLAG:
        raise SlotCorruptError(f"unknown header flags {header.flags:#x}")
    if header.payload_length > limits.payload_capacity:
        raise SlotCorruptError(
            f"payload of {header.payload_length} bytes in a slot of {limits.payload_capacity}"
        )
    if header.flags:
        verify(buffer, offset, header)
    elif header.checksum:
        raise SlotCorruptError("a checksum without the flag that says so")
    _validate_shape(header, limits)


def _validate_shape(header: RequestHeader, limits: SlotLimits) -> None:
    try:
        dtype = WireDtype(header.dtype)
    except ValueError:
        raise WrongRequestError(f"unknown dtype {header.dtype}") from None
    tokens, hidden, top_k = header.batch_size, header.hidden_size, header.top_k
    if hidden != limits.hidden_size:
        raise WrongRequestError(f"hidden size {hidden}, the model has {limits.hidden_size}")
    if header.layer >= limits.num_layers:
        raise WrongRequestError(f"layer {header.layer}, the model has {limits.num_layers}")
    if tokens == 0 or top_k == 0:
        raise WrongRequestError(f"{tokens} tokens, {top_k} experts per token")
    # With what was checked before, this bounds tokens and top_k, too.
    total = payload_layout(tokens, hidden, top_k, dtype).total
    if header.payload_length != total:
        raise SlotCorruptError(f"payload of {header.payload_length} bytes, not {total}")
    answer = result_length(tokens, hidden)
    if answer > limits.result_capacity:
        raise SlotCorruptError(f"result of {answer} bytes in a slot of {limits.result_capacity}")


def validate_result(
    header: ResultHeader,
    *,
    result_capacity: int,
    request_id: int,
    rows: int,
    hidden_size: int,
    generation: int,
) -> None:
    """Says whether a view of this result may be made; call it before `result_view`.

    Args:
        header: What stands in the slot.
        result_capacity: The slot's.
        request_id: The request's.
        rows: Tokens (T) of the request. A single row more or less would broadcast in a sum.
        hidden_size: H of the request.
        generation: The connection's.

    Raises:
        SlotCorruptError: It is not an answer to this request.
    """
    _validate_common(header, generation)
    if header.request_id != request_id:
        raise SlotCorruptError(f"answer to request {header.request_id}, not {request_id}")
    try:
        status = Status(header.status)
    except ValueError:
        raise SlotCorruptError(f"unknown status {header.status}") from None
    if status is not Status.OK:
        if header.rows or header.length:
            raise SlotCorruptError(f"status {status.name} with {header.rows} rows")
        return
    if (header.rows, header.hidden_size) != (rows, hidden_size):
        raise SlotCorruptError(
            f"result of ({header.rows}, {header.hidden_size}), not ({rows}, {hidden_size})"
        )
    if header.length != result_length(rows, hidden_size) or header.length > result_capacity:
        raise SlotCorruptError(f"result of {header.length} bytes for ({rows}, {hidden_size})")


def _validate_common(header: RequestHeader | ResultHeader, generation: int) -> None:
    if header.magic != MAGIC:
        raise SlotCorruptError(f"magic {header.magic:#x}, not {MAGIC:#x}")
    if header.version != VERSION:
        raise SlotCorruptError(f"protocol version {header.version}, this process has {VERSION}")
    if header.generation != generation:
        raise SlotCorruptError(f"generation {header.generation}, the connection has {generation}")


# -- checksum -------------------------------------------------------------------------------------

_CHECKSUM_OFFSET = 12
_AFTER_CHECKSUM = _CHECKSUM_OFFSET + 4


def seal(
    buffer: WriteableBuffer,
    offset: int,
    header: RequestHeader | ResultHeader,
    trace: bytes = b"",
) -> None:
    """Packs a header at `offset`, together with the checksum of itself and of the bytes after it.

    The last step of writing a slot with checksums: the payload or result stands there already. A
    request needs CHECKSUM_FLAG; a result is sealed when its request was. A request may have a `trace`.
    """
    header.pack_into(buffer, offset)
    if trace:
        write_trace(buffer, offset, trace)
    head = bytes(memoryview(buffer)[offset : offset + header.start])
    checksum = _checksum(head, buffer, offset, header)
    struct.pack_into("<I", buffer, offset + _CHECKSUM_OFFSET, checksum)


def verify(buffer: ReadableBuffer, offset: int, header: RequestHeader | ResultHeader) -> None:
    """Checks a header, and what follows it, against its checksum.

    Before it, `header.end` must be known to lie in the slot: `validate_result` has seen to that, and
    `validate_request` does. Answers without a result have a checksum, too: nothing in one is to be
    believed before this, not even its status.

    Raises:
        SlotCorruptError: A bit of the header or of the payload is not what was written, or the
            header that stands there is not this one any more.
    """
    # Data that comes late may be whole now, and not yet when this header was read.
    head = bytes(memoryview(buffer)[offset : offset + header.start])
    if header.unpack_from(head, 0) != header:
        raise SlotCorruptError("the header changed while it was read")
    found = _checksum(head, buffer, offset, header)
    if found != header.checksum:
        raise SlotCorruptError(f"checksum {found:#010x}, the header says {header.checksum:#010x}")


def _checksum(
    head: bytes, buffer: ReadableBuffer, offset: int, header: RequestHeader | ResultHeader
) -> int:
    """CRC-32 of a header without the checksum's own four bytes, and of what follows it; never 0."""
    crc = crc32(head[_AFTER_CHECKSUM:], crc32(head[:_CHECKSUM_OFFSET]))
    return crc32(memoryview(buffer)[offset + header.start : offset + header.end], crc) or 1


# -- trace ----------------------------------------------------------------------------------------


def write_trace(buffer: WriteableBuffer, offset: int, trace: bytes) -> None:
    """Puts a trace (TRACE_BYTES) into the request header at `offset`; after packing, which leaves zeros."""
    start = offset + TRACE_OFFSET
    memoryview(buffer)[start : start + TRACE_BYTES] = trace


def read_trace(buffer: ReadableBuffer, offset: int) -> bytes:
    """The trace in the request header at `offset`; empty where the request is not traced."""
    start = offset + TRACE_OFFSET
    trace = bytes(memoryview(buffer)[start : start + TRACE_BYTES])
    return trace if any(trace) else b""


# -- views ----------------------------------------------------------------------------------------


def request_views(
    buffer: mmap | bytearray, offset: int, header: RequestHeader
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """The three sections of a validated request, without a copy; the client fills them, too.

    Args:
        buffer: The arena's bytes.
        offset: Where the request header stands (`Arena.request_offset`).
        header: A header that passed `validate_request`, or the client's own.

    Returns:
        hidden (T, H) in `WireDtype.numpy_dtype`, ids (T, K) int32, scores (T, K) float32.
    """
    dtype = WireDtype(header.dtype)
    shape_TH = (header.batch_size, header.hidden_size)
    shape_TK = (header.batch_size, header.top_k)
    layout = payload_layout(header.batch_size, header.hidden_size, header.top_k, dtype)
    payload = offset + REQUEST_HEADER_BYTES
    return (
        _view(buffer, payload, shape_TH, dtype.numpy_dtype),
        _view(buffer, payload + layout.ids_offset, shape_TK, np.dtype("<i4")),
        _view(buffer, payload + layout.scores_offset, shape_TK, np.dtype("<f4")),
    )


def result_view(
    buffer: mmap | bytearray, offset: int, rows: int, hidden_size: int
) -> npt.NDArray[np.float32]:
    """The result (T, H) float32 behind the result header at `offset`, without a copy."""
    return _view(buffer, offset + RESULT_HEADER_BYTES, (rows, hidden_size), np.dtype("<f4"))


def _view(
    buffer: mmap | bytearray, offset: int, shape: tuple[int, int], dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    # Not np.ndarray(buffer=...): that one lets go of the buffer at once, so that closing the arena
    # under a live view would succeed, and the next look at the view be a segmentation fault.
    flat: npt.NDArray[Any] = np.frombuffer(buffer, dtype, shape[0] * shape[1], offset)
    return flat.reshape(shape)
