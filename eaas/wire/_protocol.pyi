# The numbers of protocol.h.
MAGIC: int
VERSION: int
ALIGNMENT: int
REQUEST_HEADER_BYTES: int
RESULT_HEADER_BYTES: int
TRACE_OFFSET: int
TRACE_BYTES: int
CHECKSUM_FLAG: int
DETAIL_DAMAGED: int
DOORBELL: int

FLOAT32: int
BFLOAT16: int
FLOAT16: int

SLOT_FREE: int
SLOT_WRITTEN: int
SLOT_DONE: int
SLOT_OFFLINE: int

STATUS_OK: int
STATUS_INVALID_ARGUMENT: int
STATUS_STALE_PLACEMENT: int
STATUS_INTERNAL: int
STATUS_EXPIRED: int

REQUEST_PLACES: tuple[tuple[int, int], ...]
"""Offset and bytes of each field of `RequestHeader`."""
RESULT_PLACES: tuple[tuple[int, int], ...]
"""Offset and bytes of each field of `ResultHeader`."""

# In words; whether the bytes are no request of the connection, so that no checksum can be verified; whether
# the request is intact and does not fit the server.
Fault = tuple[str, bool, bool]

def request_fault(
    header: bytes, limits: tuple[int, int, int, int], generation: int, /
) -> Fault | None:
    """What is wrong with a request, checksum apart; None: nothing. `limits`: those of `SlotLimits`."""

def answer_fault(
    header: bytes,
    request_id: int,
    result_capacity: int,
    generation: int,
    rows: int,
    hidden_size: int,
    /,
) -> Fault | None:
    """What is wrong with the header of an answer to this request, as `request_fault`."""

def payload_layout(
    tokens: int, hidden_size: int, top_k: int, dtype: int, /
) -> tuple[int, int, int]:
    """Offsets of ids and scores, and bytes of the payload; a number above 64 bits becomes their largest."""

def result_length(rows: int, hidden_size: int, /) -> int: ...
def max_tokens(
    payload_capacity: int, result_capacity: int, hidden_size: int, top_k: int, dtype: int, /
) -> int: ...
