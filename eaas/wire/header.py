"""The two headers of a slot and the lengths that follow from them (drawn in `eaas.wire.slot`).

Letters: T tokens (batch size), H hidden size, K experts per token (top-k).
"""

from __future__ import annotations

import enum
import struct
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer, WriteableBuffer

__all__ = [
    "CHECKSUM_FLAG",
    "DAMAGED",
    "MAGIC",
    "REQUEST_HEADER_BYTES",
    "RESULT_HEADER_BYTES",
    "TRACE_BYTES",
    "TRACE_OFFSET",
    "VERSION",
    "PayloadLayout",
    "RequestHeader",
    "ResultHeader",
    "Status",
    "WireDtype",
    "align",
    "max_tokens",
    "payload_layout",
    "result_length",
]

MAGIC = int.from_bytes(b"EaaS", "little")
VERSION = 1
"""Major version of the protocol: two processes with different ones do not connect."""

CHECKSUM_FLAG = 1
"""Bit of RequestHeader.flags: both headers of this exchange bear a checksum, which is never 0."""

DAMAGED = 1
"""ResultHeader.detail of an INTERNAL answer: the request was not whole, and its slot is not to be trusted."""

REQUEST_HEADER_BYTES = 128
TRACE_OFFSET = 64
TRACE_BYTES = 24
RESULT_HEADER_BYTES = 64

_ALIGNMENT = 64
_IDS_BYTES = 4
_FLOAT32_BYTES = 4


def align(length: int) -> int:
    """The length rounded up to the next multiple of 64 bytes."""
    return -(-length // _ALIGNMENT) * _ALIGNMENT


class Status(enum.IntEnum):
    """How a request ended; all but OK come without a result."""

    OK = 0
    INVALID_ARGUMENT = 1
    STALE_PLACEMENT = 2
    INTERNAL = 3
    EXPIRED = 4


class WireDtype(enum.IntEnum):
    """Dtype of the hidden states of a request."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return self.numpy_dtype.itemsize

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """The dtype of the view; bfloat16, which NumPy lacks, is seen as uint16."""
        return _NUMPY_DTYPES[self]


_NUMPY_DTYPES: dict[WireDtype, np.dtype[Any]] = {
    WireDtype.FLOAT32: np.dtype("<f4"),
    WireDtype.BFLOAT16: np.dtype("<u2"),
    WireDtype.FLOAT16: np.dtype("<f2"),
}


# -- lengths --------------------------------------------------------------------------------------


class PayloadLayout(NamedTuple):
    """Where the sections of a payload start, in bytes from its own start (hidden states: 0)."""

    ids_offset: int
    scores_offset: int
    total: int


@lru_cache(maxsize=1024)  # The same few shapes in every call.
def payload_layout(
    batch_size: int, hidden_size: int, top_k: int, dtype: WireDtype
) -> PayloadLayout:
    """The sections of a payload of T tokens, H hidden size and K experts per token."""
    pairs = batch_size * top_k
    ids_offset = align(batch_size * hidden_size * dtype.itemsize)
    scores_offset = ids_offset + align(pairs * _IDS_BYTES)
    total = scores_offset + pairs * _FLOAT32_BYTES
    return PayloadLayout(ids_offset, scores_offset, total)


def result_length(rows: int, hidden_size: int) -> int:
    """Bytes of a result of T rows and H hidden size."""
    return rows * hidden_size * _FLOAT32_BYTES


def max_tokens(
    payload_capacity: int, result_capacity: int, hidden_size: int, top_k: int, dtype: WireDtype
) -> int:
    """The most tokens of one request that fit a slot, both ways; 0 if not even one does."""
    per_token = hidden_size * dtype.itemsize + top_k * (_IDS_BYTES + _FLOAT32_BYTES)
    tokens = min(payload_capacity // per_token, result_capacity // result_length(1, hidden_size))
    # The sections' alignment can cost the last few.
    while tokens and payload_layout(tokens, hidden_size, top_k, dtype).total > payload_capacity:
        tokens -= 1
    return tokens


# -- headers --------------------------------------------------------------------------------------


_REQUEST = struct.Struct("<IHBBIIQQQQIIII64x")
_RESULT = struct.Struct("<IHHIIQIIQQQ8x")


class RequestHeader(NamedTuple):
    """What a client asks for; made by `of`. One that was read proves nothing: `validate_request`.

    A named tuple, and not a dataclass, as it is made in every call: that takes a quarter of the time.

    Attributes:
        magic: MAGIC.
        version: VERSION.
        dtype: A WireDtype.
        flags: CHECKSUM_FLAG or 0.
        generation: The connection's; the server refuses any other.
        checksum: As read; written by `seal`.
        request_id: Chosen by the client, never used twice on a connection.
        epoch: Placement epoch that the client routed by.
        payload_length: Bytes of the payload: `payload_layout(...).total`.
        budget_us: Microseconds that the answer is worth waiting for, from when the server admits the
            request: after that it is EXPIRED. Relative, so that it can cross hosts.
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
        """The header of a request of this shape; it follows how long the payload is."""
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
        """Bytes of the header: where the payload starts."""
        return REQUEST_HEADER_BYTES

    @property
    def end(self) -> int:
        """Bytes of header and payload together: where the payload ends."""
        return REQUEST_HEADER_BYTES + self.payload_length

    def pack_into(self, buffer: WriteableBuffer, offset: int) -> None:
        """Writes the header. Raises struct.error where a field does not fit its width."""
        _REQUEST.pack_into(buffer, offset, *self)

    @classmethod
    def unpack_from(cls, buffer: ReadableBuffer, offset: int) -> RequestHeader:
        """A copy of the header that stands there, whatever it says."""
        return cls._make(_REQUEST.unpack_from(buffer, offset))


class ResultHeader(NamedTuple):
    """How a request ended; made by `of`. One that was read proves nothing: `validate_result`.

    Attributes:
        magic: MAGIC.
        version: VERSION.
        status: A Status.
        generation: The connection's, as in the request.
        checksum: As read; written by `seal`.
        request_id: The request's; a client drops the answer to any other.
        rows: Tokens (T) of the result; 0 unless the status is OK.
        hidden_size: H; 0 unless the status is OK.
        length: Bytes of the result.
        detail: STALE_PLACEMENT: the server's epoch. INTERNAL: DAMAGED or 0. Otherwise 0.
        service_us: Microseconds from when the server saw the request to this answer; 0: not stated.
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
    ) -> ResultHeader:
        """The header of an answer; rows and hidden size only where the status is OK."""
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
        )

    @property
    def start(self) -> int:
        """Bytes of the header: where the result starts."""
        return RESULT_HEADER_BYTES

    @property
    def end(self) -> int:
        """Bytes of header and result together: where the result ends."""
        return RESULT_HEADER_BYTES + self.length

    def pack_into(self, buffer: WriteableBuffer, offset: int) -> None:
        """Writes the header. Raises struct.error where a field does not fit its width."""
        _RESULT.pack_into(buffer, offset, *self)

    @classmethod
    def unpack_from(cls, buffer: ReadableBuffer, offset: int) -> ResultHeader:
        """A copy of the header that stands there, whatever it says."""
        return cls._make(_RESULT.unpack_from(buffer, offset))
