"""The slot, which carries a request from client to server and the result back: bytes, states, validation.

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
    56  hidden_size      u32  H                   56  queue_us         u64
    60  top_k            u32  K
    64  trace            16 + 8 bytes, or zeros
    88  zeros

The flag of a slot is on a separate 64-byte line (see `eaas.wire.arena`):

    state     | value | transition by                | method of `Arena`   | to
    ----------+-------+------------------------------+---------------------+---------
    FREE      | 0     | the client has a request     | client_write_done   | WRITTEN
    WRITTEN   | 1     | the server wrote the result  | server_done         | DONE
    DONE      | 2     | the client read the result   | client_free         | FREE
    any       |       | the server lost the client   | server_offline      | OFFLINE
    OFFLINE   | 3     | a client connects            | server_reclaim      | FREE

Results are always float32, so that the division of a token's experts among replicas does not change a
bfloat16 result: with bfloat16 hidden states a server rounds each expert's weighted output to bfloat16, as
transformers does, and a float32 sum of such values is exact in any order, unless one is 2^13 times another.

The checksum is optional (CHECKSUM_FLAG); `seal` writes it and `verify` checks it. It covers header and
payload (or result) except its own four bytes. As a CRC-32 it detects every single flipped bit, and other
damage (a torn write, a flag visible before its data) except one case in 2^32. ISA-L computes tens of
gigabytes per second.

It does not protect against the peer, because the peer maps the same memory as the same user. A client can
change a payload after its verification, while the server computes. Then only its own rows are wrong, because
a header is read once and only that copy is validated and used, kernels read each expert id once, and rows of
a batch are independent.

The trace of a traced request is the context of the client's span (trace id and span id, as in W3C's
traceparent). It is optional: a server without tracing never reads it.

Letters: T tokens (batch size), H hidden size, K experts per token (top-k).
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32

from eaas.errors import SlotCorruptError, WrongRequestError
from eaas.wire import _protocol
from eaas.wire.header import (
    CHECKSUM_FLAG,
    DAMAGED,
    REQUEST_HEADER_BYTES,
    RESULT_HEADER_BYTES,
    TRACE_BYTES,
    TRACE_OFFSET,
    VERSION,
    RequestHeader,
    ResultHeader,
    SlotState,
    Status,
    WireDtype,
    max_tokens,
    payload_layout,
)

if TYPE_CHECKING:
    from mmap import mmap

    from _typeshed import ReadableBuffer, WriteableBuffer

    from eaas.wire._protocol import Fault

__all__ = [
    "CHECKSUM_FLAG",
    "DAMAGED",
    "DOORBELL",
    "REQUEST_HEADER_BYTES",
    "RESULT_HEADER_BYTES",
    "VERSION",
    "RequestHeader",
    "ResultHeader",
    "SlotLimits",
    "SlotState",
    "Status",
    "WireDtype",
    "max_tokens",
    "read_trace",
    "reply_doorbell",
    "request_views",
    "result_view",
    "seal",
    "validate_request",
    "verify",
    "write_trace",
]

DOORBELL = _protocol.DOORBELL
"""Index of the server's doorbell, which clients ring after writing a request."""


def reply_doorbell(first_slot: int) -> int:
    """Index of the doorbell of the connection with this first slot, which the server rings after a result."""
    return 1 + first_slot


# -- validation: no field is trusted --------------------------------------------------------------


class SlotLimits(NamedTuple):
    """Limits of the requests that a server accepts.

    Attributes:
        payload_capacity: Bytes for a request's payload in a slot.
        result_capacity: Bytes for a result in a slot.
        hidden_size: H of the model.
        num_layers: MoE layers of the model.
    """

    payload_capacity: int
    result_capacity: int
    hidden_size: int
    num_layers: int


def validate_request(
    buffer: ReadableBuffer, offset: int, header: RequestHeader, fault: Fault | None
) -> None:
    """Validate a request on the server by the fault that was found in its header, and by its checksum.

    A checksum is verified first, so that a flipped bit is not taken for the client's mistake. Expert ids are
    checked by their user.

    Args:
        buffer: The arena's bytes.
        offset: Offset of the request header.
        header: Copy of the header; the memory may have changed since.
        fault: What is wrong with the copy (`_protocol.request_fault`); None: nothing.

    Raises:
        SlotCorruptError: Magic, version, flags, generation or checksum are wrong, or lengths are inconsistent
            with one another or with the slot's capacities.
        WrongRequestError: The request is intact but does not fit this server.
    """
    words, is_frame, is_misfit = fault or ("", False, False)
    if header.flags and not is_frame:
        verify(buffer, offset, header)
    if fault is not None:
        error = WrongRequestError if is_misfit else SlotCorruptError
        raise error(f"wrong {words} in {header}")


# -- checksum -------------------------------------------------------------------------------------

_CHECKSUM_OFFSET, _CHECKSUM_BYTES = _protocol.REQUEST_PLACES[
    RequestHeader._fields.index("checksum")
]
_AFTER_CHECKSUM = _CHECKSUM_OFFSET + _CHECKSUM_BYTES


def seal(
    buffer: WriteableBuffer,
    offset: int,
    header: RequestHeader | ResultHeader,
    trace: bytes = b"",
) -> None:
    """Write a header into its slot with its checksum, after the payload or result.

    A request needs CHECKSUM_FLAG, and may have a `trace`. A result is sealed if its request was.
    """
    header.pack_into(buffer, offset)
    if trace:
        write_trace(buffer, offset, trace)
    head = bytes(memoryview(buffer)[offset : offset + header.start])
    checksum = _checksum(head, buffer, offset, header)
    struct.pack_into("<I", buffer, offset + _CHECKSUM_OFFSET, checksum)


def verify(buffer: ReadableBuffer, offset: int, header: RequestHeader | ResultHeader) -> None:
    """Verify the checksum of a header in a slot and of its payload or result.

    The caller must know that `header.end` lies in the slot (`validate_request` and a client's
    `Slots.answer_of` check it). Answers without a result also have a checksum, so do not use even the status
    before this.

    Raises:
        SlotCorruptError: The bytes are damaged, or the header in memory has changed.
    """
    # Data that was incomplete when the header was read may be complete now.
    head = bytes(memoryview(buffer)[offset : offset + header.start])
    if header.unpack_from(head, 0) != header:
        raise SlotCorruptError("the header changed while it was read")
    found = _checksum(head, buffer, offset, header)
    if found != header.checksum:
        raise SlotCorruptError(f"checksum {found:#010x}, the header says {header.checksum:#010x}")


def _checksum(
    head: bytes, buffer: ReadableBuffer, offset: int, header: RequestHeader | ResultHeader
) -> int:
    """Compute the CRC-32 of a header without the checksum's bytes, and of its payload or result; never 0."""
    crc = crc32(head[_AFTER_CHECKSUM:], crc32(head[:_CHECKSUM_OFFSET]))
    return crc32(memoryview(buffer)[offset + header.start : offset + header.end], crc) or 1


# -- trace ----------------------------------------------------------------------------------------


def write_trace(buffer: WriteableBuffer, offset: int, trace: bytes) -> None:
    """In the client, write its span's context (TRACE_BYTES) into the request header, after packing it."""
    start = offset + TRACE_OFFSET
    memoryview(buffer)[start : start + TRACE_BYTES] = trace


def read_trace(buffer: ReadableBuffer, offset: int) -> bytes:
    """On the server, read the client span's context in a request header; empty if not traced."""
    start = offset + TRACE_OFFSET
    trace = bytes(memoryview(buffer)[start : start + TRACE_BYTES])
    return trace if any(trace) else b""


# -- views ----------------------------------------------------------------------------------------


def request_views(
    buffer: mmap | bytearray, offset: int, header: RequestHeader
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Make NumPy views of the three sections of a request in a slot, for client and server.

    Args:
        buffer: The arena's bytes.
        offset: Offset of the request header (`Arena.request_offset`).
        header: A validated header, or the client's own.

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
    """Make a NumPy view of the result (T, H) float32 after the result header at `offset`."""
    return _view(buffer, offset + RESULT_HEADER_BYTES, (rows, hidden_size), np.dtype("<f4"))


def _view(
    buffer: mmap | bytearray, offset: int, shape: tuple[int, int], dtype: np.dtype[Any]
) -> npt.NDArray[Any]:
    # Not np.ndarray(buffer=...), which does not keep the buffer, so that using a view after closing the arena
    # would be a segmentation fault.
    flat: npt.NDArray[Any] = np.frombuffer(buffer, dtype, shape[0] * shape[1], offset)
    return flat.reshape(shape)
