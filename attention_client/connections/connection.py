"""The client's end of a connection to one expert server: requests and answers travel through its slots.

The code is the same for every transport: a link provides an arena and is notified of each write. A lost
connection never recovers; the server's next process gets a new connection.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from attention_client.connections.deadlines import ServiceTimes
from attention_client.connections.link import Link, slots_of
from attention_client.connections.messages import Answer, LayerInput, Ticket
from attention_client.dispatch.parts import Part
from attention_client.exchange import AWAITED, CAME, REVOKED
from attention_client.telemetry.metrics import ClientMetrics
from attention_client.telemetry.request_outcomes import Outcome
from eaas.errors import (
    ConnectionLostError,
    SlotCorruptError,
    SlotsBusyError,
    WrongRequestError,
)
from eaas.wire import RequestHeader, ResultHeader, SlotState
from eaas.wire.slot import (
    CHECKSUM_FLAG,
    DAMAGED,
    Status,
    WireDtype,
    max_tokens,
    seal,
    verify,
    write_trace,
)
from eaas.wire.views import SlotViews

__all__ = ["Connection"]

_TAKEN_BACK = "the server took its slots back"
# Longest wait for writes in progress before the slots are given back regardless.
_WRITING_S = 1.0
# Pause before damaged bytes are read again.
_SETTLE_S = 0.0002
_ANSWERED = SlotState.DONE.mask | SlotState.OFFLINE.mask
_OK = Status.OK


class _Abandoned(NamedTuple):
    """A request whose caller stopped waiting.

    Attributes:
        ticket: The request's ticket.
        overdue: Whether the server exceeded the request's budget.
        unanswered: Whether the request's work still counts as in flight.
    """

    ticket: Ticket
    overdue: bool
    unanswered: bool


class Connection:
    """The client's end of a connection to one expert server. Thread-safe.

    A slot is in one state at a time: free, with a ticket (being written, waited for, or being read),
    abandoned, in quarantine, or lost with the connection. A ticket ends with `abandon`, with an error or
    refusal from `poll`, or with `release` after `poll` returned a result.

    Args:
        server_id: Server at the other end.
        incarnation: Incarnation of that server.
        link: The transport's link to the server.
        hidden_size: H of the model.
        spin_us: Microseconds to poll before sleeping.
        checksum: Seal requests and verify the seals of answers.
        on_lost: Called once, with this connection, when it is lost.
        on_closed: Called once, when the link is closed.
        metrics: Metrics of the client.
    """

    _request_ids = itertools.count(1)

    def __init__(
        self,
        server_id: str,
        incarnation: int,
        link: Link,
        hidden_size: int,
        spin_us: int,
        checksum: bool,
        on_lost: Callable[[Connection], None],
        on_closed: Callable[[], None],
        metrics: ClientMetrics,
    ) -> None:
        self.server_id = server_id
        self.incarnation = incarnation
        self.lost_reason: str | None = None
        self.service = ServiceTimes()
        self._link = link
        self._flags = link.arena.flags
        self._hidden_size = hidden_size
        self._spin_us = spin_us
        self._views = SlotViews(link.arena, hidden_size)
        self._header_flags = CHECKSUM_FLAG if checksum else 0
        self._on_lost = on_lost
        self._on_closed = on_closed
        self._metrics = metrics
        # Held briefly, and never while taking another lock.
        self._lock = threading.Lock()
        # For requests made here and by compiled layer calls.
        self.slots = slots_of(link, hidden_size)
        # True until the server answers, then False while the answer is read.
        self._tickets: dict[Ticket, bool] = {}
        self._abandoned: dict[int, _Abandoned] = {}
        self._writers = 0
        self._quarantined: set[int] = set()
        self._closing = False
        self._unlinked = False

    @property
    def transport(self) -> str:
        """Name of the transport that carries the slots: shm, grpc or nixl, also if `auto` chose it."""
        return self._link.transport

    @property
    def is_direct(self) -> bool:
        """Whether the server itself polls the slots; else `notify` tells it of a request."""
        return self._link.direct

    def notify(self, slot: int) -> None:
        """Tell the server of a request that a compiled layer call has written into this slot."""
        self._link.notify(slot)

    # -- state ----------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Number of slots that are not free, abandoned and quarantined ones included."""
        return self._link.slots - self.slots.free_count

    @property
    def work_in_flight(self) -> float:
        """Unanswered work (`dispatch.parts.Part`), abandoned requests too; dispatch counts it as backlog."""
        return self.slots.work

    def max_tokens(self, top_k: int, dtype: WireDtype) -> int:
        """Return how many tokens fit into one slot; dispatch cuts larger parts."""
        link = self._link
        return max_tokens(
            link.payload_capacity, link.result_capacity, self._hidden_size, top_k, dtype
        )

    def owes_answer(self) -> bool:
        """Whether an overdue request is unanswered: layer calls avoid the server. Frees answered slots."""
        if not self._abandoned:
            return False
        with self._lock:
            own = self._unlinked or self._reclaim_late()
            owes = any(abandoned.overdue for abandoned in self._abandoned.values())
        if not own:
            self.lose(_TAKEN_BACK)
        return owes

    def lose(self, reason: str) -> None:
        """Declare the connection lost: wake all in `wait`, call `on_lost`, which reconnects. Idempotent."""
        with self._lock:
            if self.lost_reason is not None:
                return
            self.lost_reason = reason
            self.slots.stop()
        self.wake()
        self._on_lost(self)

    def wake(self) -> None:
        """Wake every thread that sleeps in `wait`, so that its layer call polls all its requests."""
        with self._lock:
            if not self._unlinked:
                self._flags.interrupt(self._link.reply_doorbell)

    def close(self) -> None:
        """Declare the connection lost and give its slots back, after a loss or at the end. Idempotent.

        Open tickets get ConnectionLostError; the arena closes when the last of them ends.
        """
        self.lose("closed")
        with self._lock:
            if self._closing:
                return
            self._closing = True
        # Wait for writes in progress, because the server may grant the slots to others at once.
        deadline = time.monotonic() + _WRITING_S
        while (self._writers or self.slots.writers) and time.monotonic() < deadline:
            time.sleep(_SETTLE_S)
        self._link.close()
        with self._lock:
            self._unlinked = True
            self._let_go()
        self._on_closed()

    # -- one exchange ---------------------------------------------------------------------------------

    def submit(
        self, inputs: LayerInput, epoch: int, part: Part, budget_s: float, trace: bytes = b""
    ) -> Ticket:
        """Write one part of a layer call into a free slot and hand it to the server.

        Args:
            inputs: Inputs of the layer call.
            epoch: Epoch of the placement in use.
            part: This server's part; at most `max_tokens` rows.
            budget_s: Time after which the answer is useless.
            trace: Span context for the server's spans; empty: not traced.

        Raises:
            SlotsBusyError: Every slot is in use.
            ConnectionLostError: The connection is lost, or the server took the slot back.
            WrongRequestError: The hidden size is not the model's.
        """
        rows, top_k = part.ids_RK.shape
        if inputs.x_TH.shape[1] != self._hidden_size:
            raise WrongRequestError(
                f"hidden size {inputs.x_TH.shape[1]}, the server has {self._hidden_size}"
            )
        ticket = self._take_slot(next(self._request_ids), rows, part.work)
        try:
            self._write(ticket, inputs, epoch, part, top_k, budget_s, trace)
        finally:
            with self._lock:
                self._writers -= 1
        return ticket

    def _write(
        self,
        ticket: Ticket,
        inputs: LayerInput,
        epoch: int,
        part: Part,
        top_k: int,
        budget_s: float,
        trace: bytes,
    ) -> None:
        """Fill a ticket's slot with its request and hand it to the server. A failure ends the ticket."""
        slot, slots = ticket.slot, self.slots
        try:
            written = slots.write(
                slot,
                ticket.request_id,
                self._header_flags,
                int(budget_s * 1e6),
                epoch,
                inputs.layer,
                inputs.dtype,
                inputs.x_TH,
                inputs.scores_TK,
                top_k,
                part.rows_R,
                part.ids_RK,
            )
            if written and (self._header_flags or trace):
                self._add_to_header(slot, trace)
        except BaseException:  # Usually from a signal handler. Nothing was handed over yet.
            self._end(ticket, free=True)
            raise
        # After a long pause of this process the slot may belong to another client.
        if not (written and slots.hand_over(slot)):
            raise self._taken_back(ticket)
        self._link.notify(slot)

    def _add_to_header(self, slot: int, trace: bytes) -> None:
        buffer, offset = self._link.arena.buffer, self._link.arena.request_offset(slot)
        if self._header_flags:
            seal(buffer, offset, RequestHeader.unpack_from(buffer, offset), trace)
        else:
            write_trace(buffer, offset, trace)

    def seq(self) -> int:
        """Return the reply doorbell's count. Read it before polling, then pass it to `wait`."""
        return self._flags.seq(self._link.reply_doorbell)

    def wait(self, ticket: Ticket, seen_seq: int, timeout_s: float) -> None:
        """Sleep until the ticket is answered, the doorbell passes `seen_seq`, or the timeout."""
        self._flags.wait(
            ticket.slot,
            1,
            _ANSWERED,
            self._link.reply_doorbell,
            seen_seq,
            self._spin_us,
            max(0, int(timeout_s * 1e6)),
        )

    def poll(self, ticket: Ticket) -> Answer | None:
        """Poll for a request's answer. A result stays in its slot until `release`; others end the ticket.

        Returns:
            The answer; None while there is none.

        Raises:
            ConnectionLostError: The connection is lost, or the server took the slot back.
            SlotCorruptError: The answer belongs to another request, or bytes of the request or answer were
                damaged (with checksums; that slot is not used again).
        """
        try:
            header = self._read_header(ticket)
        except SlotCorruptError as error:
            if not self._header_flags:
                # Probably an answer to another request, so the slot itself is undamaged.
                self.release(ticket)
                self._metrics.late_answers.inc()
                raise
            header = self._read_again(ticket, error)
        if header is None:
            return None
        if header.status == _OK:
            self._answered(ticket)
            return Answer(header, self._views.result(ticket.slot, ticket.rows))
        if header.status == Status.INTERNAL and header.detail == DAMAGED and self._header_flags:
            self._quarantine(ticket)
            raise SlotCorruptError("the request reached the server damaged")
        self.release(ticket)
        return Answer(header, None)

    def _read_header(self, ticket: Ticket) -> ResultHeader | None:
        """Read an answer's header and check that it answers this request, undamaged; None: no answer yet.

        Raises:
            ConnectionLostError: As `poll`; ends the ticket.
            SlotCorruptError: It answers another request, or bytes are damaged.
        """
        slot = ticket.slot
        state, header_bytes, fault = self.slots.answer_of(slot, ticket.request_id, ticket.rows)
        if state == CAME:
            header = ResultHeader.unpack_from(header_bytes, 0)
            if self._header_flags:
                arena = self._link.arena
                verify(arena.buffer, arena.result_offset(slot), header)
            return header
        if state == REVOKED or (state == AWAITED and self.lost_reason is not None):
            raise self._taken_back(ticket)
        if state == AWAITED:
            return None
        raise SlotCorruptError(f"slot {slot}: wrong {fault}")

    def _read_again(self, ticket: Ticket, error: SlotCorruptError) -> ResultHeader | None:
        """Read a damaged answer once more, because bytes may arrive after their flag.

        If it is still damaged, quarantines the slot and raises the first error.
        """
        time.sleep(_SETTLE_S)
        try:
            return self._read_header(ticket)
        except SlotCorruptError:
            self._quarantine(ticket)
            raise error from None

    def release(self, ticket: Ticket) -> bool:
        """End a ticket and free its slot for other requests, once its answer was read or is of no use.

        Returns:
            Whether the slot still belonged to this connection; if not, the data read may be invalid.
        """
        own = self.slots.free(ticket.slot)
        self._end(ticket, free=own)
        if not own:
            self.lose(_TAKEN_BACK)
        return own

    def abandon(self, ticket: Ticket, *, overdue: bool) -> None:
        """Stop waiting for a request. Its slot is freed once the server answers; the answer is dropped.

        Idempotent.

        Args:
            ticket: Any ticket of this connection.
            overdue: Whether the server exceeded the request's budget; if so, `owes_answer` until it answers.
        """
        with self._lock:
            unanswered = self._tickets.pop(ticket, None)
            if unanswered is None:
                return
            self._abandoned[ticket.slot] = _Abandoned(ticket, overdue, unanswered)
            self.slots.abandoned = len(self._abandoned)
            self._let_go()

    def adopt(self, slot: int, request_id: int, rows: int, work: float) -> Ticket:
        """Take over a request that a compiled layer call sent; the ticket is as those of `submit`."""
        ticket = Ticket(slot, request_id, rows, work)
        with self._lock:
            self._tickets[ticket] = True
            self.slots.add_work(work)
            # From here on, the ticket keeps the arena open.
            self.slots.leave()
        return ticket

    # -- slots ----------------------------------------------------------------------------------------

    def _take_slot(self, request_id: int, rows: int, work: float) -> Ticket:
        """Take a free slot for a request; counts as a writer until the caller decrements `_writers`."""
        own = True
        with self._lock:
            if self.lost_reason is not None:
                raise ConnectionLostError(f"{self.server_id}: {self.lost_reason}")
            slot = self.slots.take()
            if slot < 0:
                own = self._reclaim_late()
                slot = self.slots.take()
            if slot >= 0:
                ticket = Ticket(slot, request_id, rows, work)
                self._tickets[ticket] = True
                self.slots.add_work(work)
                self._writers += 1
                return ticket
        if not own:
            self.lose(_TAKEN_BACK)
            raise ConnectionLostError(f"{self.server_id}: {self.lost_reason}")
        raise SlotsBusyError(f"{self.server_id}: all {self._link.slots} slots in flight")

    def _taken_back(self, ticket: Ticket) -> ConnectionLostError:
        """End a ticket that has lost its slot, declare the connection lost, and return the error to raise."""
        self.lose(_TAKEN_BACK)
        self._end(ticket, free=False)
        return ConnectionLostError(f"{self.server_id}: {self.lost_reason}")

    def _quarantine(self, ticket: Ticket) -> None:
        """End a ticket and never use its damaged slot again; lose the connection if no slot is left."""
        self._end(ticket, free=False)
        with self._lock:
            self._quarantined.add(ticket.slot)
            all_bad = len(self._quarantined) == self._link.slots
        self._metrics.quarantined_slots.inc()
        if all_bad:
            self.lose("every slot is in quarantine")

    def _answered(self, ticket: Ticket) -> None:
        """Subtract an answered ticket's work from the work in flight; the lock is not held."""
        with self._lock:
            if self._tickets.get(ticket):
                self._tickets[ticket] = False
                self.slots.add_work(-ticket.work)

    def _end(self, ticket: Ticket, *, free: bool) -> None:
        with self._lock:
            if self._tickets.pop(ticket, False):
                self.slots.add_work(-ticket.work)
            if free:
                self.slots.give(ticket.slot)
            self._let_go()

    def _let_go(self) -> None:
        """Close the arena if it is unlinked and no ticket is open; the lock is held."""
        if self._unlinked and not self._tickets and not self.slots.users:
            self._views.clear()
            self.slots.release()
            self._link.arena.close()

    def _reclaim_late(self) -> bool:
        """Free the slots of abandoned requests that the server has answered by now.

        The lock is held, and the arena is open. Returns whether the slots still belong to this connection.
        """
        for slot, abandoned in tuple(self._abandoned.items()):
            ticket = abandoned.ticket
            state, header_bytes, _ = self.slots.answer_of(slot, ticket.request_id, ticket.rows)
            if state == AWAITED:
                continue
            if not self.slots.free(slot):
                return False
            del self._abandoned[slot]
            self.slots.abandoned = len(self._abandoned)
            if abandoned.unanswered:
                self.slots.add_work(-ticket.work)
            self.slots.give(slot)
            self._metrics.late_answers.inc()
            # Do not count a late error as an answer, because the timeout was counted already.
            if state == CAME and ResultHeader.unpack_from(header_bytes, 0).status == Status.OK:
                self._metrics.outcomes.count(self, Outcome.ANSWERED)
        return True
