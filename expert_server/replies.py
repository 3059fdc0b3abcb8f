"""The way back: an answer into its slot, and the slot to its client."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eaas.wire import Arena, RequestHeader, ResultHeader
from eaas.wire.slot import CHECKSUM_FLAG, Status, seal
from eaas.wire.views import SlotViews
from expert_server.slots import Grant
from expert_server.views import PayloadViews

__all__ = ["Replies", "Request"]


class Request(NamedTuple):
    """A request that was admitted: its header is valid and its views are made.

    Attributes:
        slot: Where it stands.
        grant: Whose it is.
        header: A copy; what stands in the slot may have become another.
        views: Its payload.
        admitted_at: Monotonic seconds.
        expires_at: When its budget is over.
    """

    slot: int
    grant: Grant
    header: RequestHeader
    views: PayloadViews
    admitted_at: float
    expires_at: float


class Replies:
    """Writes answers. One whose slot was revoked meanwhile goes nowhere.

    Args:
        arena: The server's arena.
        views: Of its slots.
    """

    def __init__(self, arena: Arena, views: SlotViews) -> None:
        self._arena = arena
        self._buffer = arena.buffer
        self._views = views

    def result(self, request: Request, rows_TH: npt.NDArray[np.float32], now: float) -> None:
        """The result of a request."""
        tokens, hidden = rows_TH.shape
        np.copyto(self._views.result(request.slot, tokens), rows_TH)
        answer = ResultHeader.of(
            Status.OK,
            generation=request.grant.generation,
            request_id=request.header.request_id,
            rows=tokens,
            hidden_size=hidden,
            # 0 would say that it is not known.
            service_us=max(1, int((now - request.admitted_at) * 1e6)),
        )
        self._finish(request.slot, request.grant, request.header, answer)

    def error(
        self, slot: int, grant: Grant, header: RequestHeader, status: Status, detail: int = 0
    ) -> None:
        """Why there is no result. The header may be one that was refused."""
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
