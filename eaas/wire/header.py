"""Request and result headers of a slot, and lengths of its sections (drawing: `eaas.wire.slot`).

Letters: T tokens (batch size), H hidden size, K experts per token (top-k).
"""

from __future__ import annotations

import enum
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from eaas.wire import _protocol

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = [
    "CHECKSUM_FLAG",
    "DAMAGED",
    "LEAST_SLOT_TOKENS",
    "MAGIC",
    "REQUEST_HEADER_BYTES",
    "RESULT_HEADER_BYTES",
    "TRACE_BYTES",
    "TRACE_OFFSET",
    "VERSION",
    "PayloadLayout",
    "RequestHeader",
    "ResultHeader",
    "SlotState",
    "Status",
    "WireDtype",
    "align",
    "max_tokens",
    "payload_layout",
    "result_length",
    "slot_sizes",
]

MAGIC = _protocol.MAGIC
VERSION = _protocol.VERSION
"""Major version of the protocol; processes with different versions do not connect."""

CHECKSUM_FLAG = _protocol.CHECKSUM_FLAG
"""Bit of RequestHeader.flags that marks an exchange with checksums (never 0) in both headers."""

DAMAGED = _protocol.DETAIL_DAMAGED
"""ResultHeader.detail of an INTERNAL answer to a damaged request; the client must not reuse its slot."""

LEAST_SLOT_TOKENS = 64
"""Tokens for which a slot has memory at least, unless its client asks for fewer."""

REQUEST_HEADER_BYTES = _protocol.REQUEST_HEADER_BYTES
TRACE_OFFSET = _protocol.TRACE_OFFSET
TRACE_BYTES = _protocol.TRACE_BYTES
RESULT_HEADER_BYTES = _protocol.RESULT_HEADER_BYTES


def align(length: int) -> int:
    """Round a length or offset in a slot or arena up to a multiple of 64 bytes."""
    return -(-length // _protocol.ALIGNMENT) * _protocol.ALIGNMENT


class SlotState(enum.IntEnum):
    """State of a slot: the value of its flag."""

    FREE = _protocol.SLOT_FREE
    WRITTEN = _protocol.SLOT_WRITTEN
    DONE = _protocol.SLOT_DONE
    OFFLINE = _protocol.SLOT_OFFLINE

    @property
    def mask(self) -> int:
        """Bit mask of this slot state, to look for slots in it with `Flags.scan` and `Flags.wait`."""
        return 1 << self


class Status(enum.IntEnum):
    """Status of a server's answer; only OK has a result. Clients do not retry after INVALID_ARGUMENT."""

    OK = _protocol.STATUS_OK
    INVALID_ARGUMENT = _protocol.STATUS_INVALID_ARGUMENT
    STALE_PLACEMENT = _protocol.STATUS_STALE_PLACEMENT
    INTERNAL = _protocol.STATUS_INTERNAL
    EXPIRED = _protocol.STATUS_EXPIRED


class WireDtype(enum.IntEnum):
    """Dtype of a request's hidden states in a slot."""

    FLOAT32 = _protocol.FLOAT32
    BFLOAT16 = _protocol.BFLOAT16
    FLOAT16 = _protocol.FLOAT16

    @property
    def itemsize(self) -> int:
        """Bytes per element of this dtype."""
        return self.numpy_dtype.itemsize

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """Dtype of NumPy views; uint16 for bfloat16, which NumPy lacks."""
        return _NUMPY_DTYPES[self]


_NUMPY_DTYPES: dict[WireDtype, np.dtype[Any]] = {
    WireDtype.FLOAT32: np.dtype("<f4"),
    WireDtype.BFLOAT16: np.dtype("<u2"),
    WireDtype.FLOAT16: np.dtype("<f2"),
}


# -- lengths --------------------------------------------------------------------------------------


class PayloadLayout(NamedTuple):
    """Offsets of the sections of a request's payload from its start, in bytes (hidden states: 0)."""

    ids_offset: int
    scores_offset: int
    total: int


@lru_cache(maxsize=1024)  # All calls use the same few shapes.
def payload_layout(
    batch_size: int, hidden_size: int, top_k: int, dtype: WireDtype
) -> PayloadLayout:
    """Compute the layout of a request's payload for T tokens, hidden size H and K experts per token."""
    return PayloadLayout(*_protocol.payload_layout(batch_size, hidden_size, top_k, dtype))


def result_length(rows: int, hidden_size: int) -> int:
    """Compute the bytes of a result of T rows and hidden size H, which is always float32."""
    return _protocol.result_length(rows, hidden_size)


def slot_sizes(tokens: int, hidden_size: int, top_k: int) -> list[tuple[int, int]]:
    """Compute bytes of payload and result of slots for this many tokens, and for fewer; ascending."""
    steps = [tokens]
    while steps[-1] >= 2 * LEAST_SLOT_TOKENS:
        steps.append(steps[-1] // 2)
    return [
        (
            payload_layout(step, hidden_size, top_k, WireDtype.FLOAT32).total,
            result_length(step, hidden_size),
        )
        for step in reversed(steps)
    ]


def max_tokens(
    payload_capacity: int, result_capacity: int, hidden_size: int, top_k: int, dtype: WireDtype
) -> int:
    """Compute the most tokens per request that fit into a slot with their result; 0 if none does.

    Clients split larger parts of a layer call into several requests.
    """
    return _protocol.max_tokens(payload_capacity, result_capacity, hidden_size, top_k, dtype)


# -- headers --------------------------------------------------------------------------------------


def _header(places: tuple[tuple[int, int], ...], size: int) -> struct.Struct:
    """Describe a header by the places of its fields; bytes between and after them are zeros."""
    codes, end = "<", 0
    for offset, length in places:
        codes += "x" * (offset - end) + {1: "B", 2: "H", 4: "I", 8: "Q"}[length]
        end = offset + length
    return struct.Struct(codes + "x" * (size - end))


_REQUEST = _header(_protocol.REQUEST_PLACES, REQUEST_HEADER_BYTES)
_RESULT = _header(_protocol.RESULT_PLACES, RESULT_HEADER_BYTES)


class RequestHeader(NamedTuple):
    """Header of a request in a slot. Make one with `of`; check a received one with `validate_request`.

    It is a named tuple, because every call makes one and a dataclass takes four times as long.

    Attributes:
        magic: MAGIC.
        version: VERSION.
        dtype: A WireDtype.
        flags: CHECKSUM_FLAG or 0.
        generation: Generation of the connection; the server refuses requests of any other.
        checksum: Written by `seal`.
        request_id: Chosen by the client, unique on a connection.
        epoch: Placement epoch of the client's routing.
        payload_length: Bytes of the payload: `payload_layout(...).total`.
        budget_us: Microseconds after admission by the server until the request is EXPIRED. Relative, so that
            it is valid across hosts.
        layer: MoE layer.
        batch_size: Tokens (T).
        hidden_size: H.
        top_k: Experts per token (K).
    """

    magic: int
    version: int
    dtype: int
    flags: int
    generation: int
    checksum: int
    request_id: int
    epoch: int
    payload_length: int
    budget_us: int
    layer: int
    batch_size: int
    hidden_size: int
    top_k: int

    @classmethod
    def of(
        cls,
        *,
        dtype: WireDtype,
        generation: int,
        request_id: int,
        epoch: int,
        budget_us: int,
        layer: int,
        batch_size: int,
        hidden_size: int,
        top_k: int,
        flags: int = 0,
    ) -> RequestHeader:
        """In the client, make a request's header; the payload's length follows from the shape."""
        total = payload_layout(batch_size, hidden_size, top_k, dtype).total
        return cls(
            MAGIC,
            VERSION,
            dtype,
            flags,
            generation,
            0,
            request_id,
            epoch,
            total,
            budget_us,
            layer,
            batch_size,
            hidden_size,
            top_k,
        )

    @property
    def start(self) -> int:
        """Bytes of the request header, which is the offset of the payload."""
        return REQUEST_HEADER_BYTES

    @property
    def end(self) -> int:
        """Bytes of request header and payload."""
        return REQUEST_HEADER_BYTES + self.payload_length

    def packed(self) -> bytes:
        """Return the bytes of the request header. Raises struct.error if a field exceeds its width."""
        return _REQUEST.pack(*self)

    def pack_into(self, buffer: WriteableBuffer, offset: int) -> None:
        """Write the request header into a buffer. Raises struct.error if a field exceeds its width."""
        _REQUEST.pack_into(buffer, offset, *self)

    @classmethod
    def unpack_from(cls, buffer: ReadableBuffer, offset: int) -> RequestHeader:
        """Copy a request header from a slot, without validation; the server validates and uses this copy."""
        return cls._make(_REQUEST.unpack_from(buffer, offset))


class ResultHeader(NamedTuple):
    """Header of an answer in a slot. Make one with `of`; a client checks a received one by `Slots.answer_of`.

    Attributes:
        magic: MAGIC.
        version: VERSION.
        status: A Status.
        generation: Generation of the connection, as in the request.
        checksum: Written by `seal`.
        request_id: Id of the request; a client drops answers to others.
        rows: Tokens (T) of the result; 0 unless the status is OK.
        hidden_size: H; 0 unless the status is OK.
        length: Bytes of the result.
        detail: STALE_PLACEMENT: the server's epoch. INTERNAL: DAMAGED or 0. Otherwise 0.
        service_us: Microseconds between the server's first view of the request and this answer; 0 if unset.
        queue_us: Those of them in which the server computed for other requests.
    """

    magic: int
    version: int
    status: int
    generation: int
    checksum: int
    request_id: int
    rows: int
    hidden_size: int
    length: int
    detail: int
    service_us: int
    queue_us: int

    @classmethod
    def of(
        cls,
        status: Status,
        *,
        generation: int,
        request_id: int,
        rows: int = 0,
        hidden_size: int = 0,
        detail: int = 0,
        service_us: int = 0,
        queue_us: int = 0,
    ) -> ResultHeader:
        """On the server, make an answer's header; only status OK has rows and a hidden size."""
        length = result_length(rows, hidden_size)
        return cls(
            MAGIC,
            VERSION,
            status,
            generation,
            0,
            request_id,
            rows,
            hidden_size,
            length,
            detail,
            service_us,
            queue_us,
        )

    @property
    def start(self) -> int:
        """Bytes of the result header, which is the offset of the result."""
        return RESULT_HEADER_BYTES

    @property
    def end(self) -> int:
        """Bytes of result header and result."""
        return RESULT_HEADER_BYTES + self.length

    def packed(self) -> bytes:
        """Return the bytes of the result header. Raises struct.error if a field exceeds its width."""
        return _RESULT.pack(*self)

    def pack_into(self, buffer: WriteableBuffer, offset: int) -> None:
        """Write the result header into a buffer. Raises struct.error if a field exceeds its width."""
        _RESULT.pack_into(buffer, offset, *self)

    @classmethod
    def unpack_from(cls, buffer: ReadableBuffer, offset: int) -> ResultHeader:
        """Copy a result header from the buffer, without validation."""
        return cls._make(_RESULT.unpack_from(buffer, offset))
