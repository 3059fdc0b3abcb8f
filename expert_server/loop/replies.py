"""Writes the answers of an expert server's loop into the requests' slots, and rings clients' doorbells."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eaas.wire import Arena, RequestHeader, ResultHeader
from eaas.wire.slot import CHECKSUM_FLAG, Status, seal
from eaas.wire.views import SlotViews
from expert_server.loop.views import PayloadViews
from expert_server.transports.slot_ownership import Grant

__all__ = ["Replies", "Request"]


class Request(NamedTuple):
    """An admitted request: its header is valid and its views are made.

    Attributes:
        slot: The slot that holds it.
        grant: The slot's owner.
        header: A copy; the slot's own header may change if the slot is revoked.
        views: Views of its payload.
        admitted_at: Monotonic seconds.
        expires_at: When its time budget ends.
    """

    slot: int
    grant: Grant
    header: RequestHeader
    views: PayloadViews
    admitted_at: float
    expires_at: float


class Replies:
    """Writes the loop's answers into slots. An answer to a revoked slot is dropped.

    Args:
        arena: The server's arena.
        views: Views of its slots.
    """

    def __init__(self, arena: Arena, views: SlotViews) -> None:
        self._arena = arena
        self._buffer = arena.buffer
        self._views = views

    def rows(self, request: Request, rows_TH: npt.NDArray[np.float32]) -> None:
        """Copy a request's result into its slot, for `result`."""
        np.copyto(self._views.result(request.slot, len(rows_TH)), rows_TH)

    def result(self, request: Request, now: float, own_s: float) -> None:
        """Hand a slot with a result to its client (header, DONE, doorbell).

        Args:
            request: The request.
            now: Monotonic seconds.
            own_s: Seconds that the server spent on this request: its part of the batch.
        """
        # 0 means unknown.
        service_us = max(1, int((now - request.admitted_at) * 1e6))
        answer = ResultHeader.of(
            Status.OK,
            generation=request.grant.generation,
            request_id=request.header.request_id,
            rows=request.header.batch_size,
            hidden_size=request.header.hidden_size,
            service_us=service_us,
            queue_us=max(0, int((now - request.admitted_at - own_s) * 1e6)),
        )
        self._finish(request.slot, request.grant, request.header, answer)

    def error(
        self, slot: int, grant: Grant, header: RequestHeader, status: Status, detail: int = 0
    ) -> None:
        """Write an error answer into a slot and hand it to the client, as `result` does.

        The header may be an invalid one.
        """
        answer = ResultHeader.of(
            status, generation=grant.generation, request_id=header.request_id, detail=detail
        )
        self._finish(slot, grant, header, answer)

    def _finish(self, slot: int, grant: Grant, header: RequestHeader, answer: ResultHeader) -> None:
        offset = self._arena.result_offset(slot)
        if header.flags & CHECKSUM_FLAG:
            seal(self._buffer, offset, answer)
        else:
            answer.pack_into(self._buffer, offset)
        if self._arena.server_done(slot):
            self._arena.flags.ring(grant.reply_bell)
