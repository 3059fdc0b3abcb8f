"""The slots of an expert server's loop: its requests, and the answers to them.

The verbs are compiled (`slots.h`). Around them is what only Python does: checksums, errors and the log.
"""

from __future__ import annotations

import time
from typing import NamedTuple

from eaas.errors import SlotCorruptError, WrongRequestError
from eaas.log import get_logger
from eaas.wire import Arena, RequestHeader, ResultHeader
from eaas.wire.slot import DAMAGED, SlotLimits, Status, seal, validate_request
from expert_server.loop._slots import Slots
from expert_server.transports.slot_ownership import Grant, SlotTable

__all__ = ["Request", "ServedSlots"]

_log = get_logger(__name__)
# How long data may lag behind its flag, on a transport that does not order them.
_SETTLE_S = 1e-4


class Request(NamedTuple):
    """An accepted request.

    Attributes:
        slot: The slot that holds it, claimed until the reply.
        grant: The slot's owner.
        header: A copy; the slot's own header may change.
        header_bytes: The same copy, with the trace.
        admitted_at: Monotonic seconds.
        expires_at: When its time budget ends.
    """

    slot: int
    grant: Grant
    header: RequestHeader
    header_bytes: bytes
    admitted_at: float
    expires_at: float


class ServedSlots:
    """Accepts the requests in an arena's slots, and replies to them.

    Args:
        arena: The server's arena.
        table: Slot ownership.
        limits: The server's limits.
        layers: The kernel's `ExpertKernel.direct`; None: it has none.

    Attributes:
        verbs: The compiled verbs.
        refused: Requests answered with an error, other than EXPIRED.
    """

    def __init__(
        self,
        arena: Arena,
        table: SlotTable,
        limits: SlotLimits,
        layers: list[object | None] | None,
    ) -> None:
        self._arena = arena
        self._table = table
        flags, doorbells, _, slots = arena.offsets
        self.verbs = Slots(
            arena.buffer,
            arena.slots,
            (flags, doorbells, slots),
            (arena.request_stride, arena.result_stride),
            limits,
            [] if layers is None else layers,
            table.owners,
        )
        self.refused = 0

    def accept(self, slot: int, now: float) -> Request | None:
        """Claim the slot and return its valid request, for `reply`, or `release` if its grant is revoked.

        None: it has none, or an invalid one, which was refused, or no owner; then nothing is claimed.
        """
        found = self._read(slot, now)
        if found is not None and isinstance(found[1], SlotCorruptError):
            # Perhaps the data lags behind its flag. Retry only once, because other requests wait.
            self.verbs.release(slot)
            _settle()
            found = self._read(slot, now)
        if found is None:
            self._table.close_unowned(slot)
            return None
        request, error = found
        if error is None:
            return request
        grant = request.grant
        _log.warning(
            "slot %d of %s, generation %d: %s", slot, grant.client_id, grant.generation, error
        )
        # A wrong request fails on every server. The client sends a damaged one again.
        if isinstance(error, WrongRequestError):
            self.refuse(request, Status.INVALID_ARGUMENT)
        else:
            self.refuse(request, Status.INTERNAL, DAMAGED)
        return None

    def reply(
        self,
        request: Request,
        status: Status,
        detail: int = 0,
        service_s: float = 0.0,
        queue_s: float = 0.0,
    ) -> None:
        """Hand an accepted request's slot to its client with an answer; with OK, its result is in the slot.

        The answer to a revoked slot is dropped. The arguments are those of `Slots.write_answer`.
        """
        slot, verbs = request.slot, self.verbs
        unsealed = verbs.write_answer(slot, status, detail, service_s, queue_s)
        if unsealed is not None:
            offset = self._arena.result_offset(slot)
            seal(self._arena.buffer, offset, ResultHeader.unpack_from(unsealed, 0))
        verbs.hand_over(slot)
        verbs.release(slot)

    def refuse(self, request: Request, status: Status, detail: int = 0) -> None:
        """Reply with an error, and count it."""
        self.refused += 1
        self.reply(request, status, detail)

    def _read(
        self, slot: int, now: float
    ) -> tuple[Request, SlotCorruptError | WrongRequestError | None] | None:
        """Accept what is in a slot; return it with the error that makes it invalid, if any."""
        accepted = self.verbs.accept(slot)
        if accepted is None:
            return None
        data, fault = accepted
        grant = self._table.owner(slot)
        if grant is None:
            # Revoked in this very moment.
            self.verbs.release(slot)
            return None
        header = RequestHeader.unpack_from(data, 0)
        request = Request(slot, grant, header, data, now, now + header.budget_us * 1e-6)
        try:
            validate_request(self._arena.buffer, self._arena.request_offset(slot), header, fault)
        except (SlotCorruptError, WrongRequestError) as error:
            return request, error
        return request, None


def _settle() -> None:
    time.sleep(_SETTLE_S)
