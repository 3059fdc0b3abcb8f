"""Whether a header is that of an answer to a request, as a client decides."""

from __future__ import annotations

from eaas.errors import SlotCorruptError
from eaas.wire import ResultHeader, _protocol

__all__ = ["validate_result"]


def validate_result(
    header: ResultHeader,
    *,
    result_capacity: int,
    request_id: int,
    rows: int,
    hidden_size: int,
    generation: int,
) -> None:
    """Validate the header of a result on the client; call this before `result_view`.

    Args:
        header: Header in the slot.
        result_capacity: Capacity of the slot.
        request_id: Id of the request.
        rows: Tokens (T) of the request; a single row would broadcast in a sum.
        hidden_size: H of the request.
        generation: Generation of the connection.

    Raises:
        SlotCorruptError: The slot holds no intact answer to this request.
    """
    fault = _protocol.answer_fault(
        header.packed(), request_id, result_capacity, generation, rows, hidden_size
    )
    if fault is not None:
        raise SlotCorruptError(
            f"wrong {fault[0]} in {header}: request {request_id}, generation {generation},"
            f" ({rows}, {hidden_size}) in {result_capacity} bytes"
        )
