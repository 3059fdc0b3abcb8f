"""One client, one server, some slots between them.

The same code for every transport: a link gives an arena and is kicked after each write; what carries the
bytes from there is its own affair. A connection is lost once, for good: another life of the server gets
another connection.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from attention_client.budget import ServiceTimes
from attention_client.metrics import ClientMetrics
from eaas.errors import ConnectionLostError, SlotsBusyError, WrongRequestError
from eaas.wire import Arena, RequestHeader, ResultHeader, SlotState
from eaas.wire.slot import (
    WireDtype,
    max_tokens,
    request_views,
    result_view,
    validate_result,
)

__all__ = ["WIRE_DTYPES", "Connection", "Link", "Result", "Ticket"]

WIRE_DTYPES = {
    torch.float32: WireDtype.FLOAT32,
    torch.bfloat16: WireDtype.BFLOAT16,
    torch.float16: WireDtype.FLOAT16,
}
_ANSWERED = SlotState.DONE.mask | SlotState.OFFLINE.mask


class Link(Protocol):
    """What a transport gives to a connection. The arena's generation words are those of the grant."""

    arena: Arena
    first_slot: int
    slots: int
    reply_bell: int
    generation: int

    def kick(self, slot: int) -> None:
        """Tell the server's side that this slot was written."""

    def close(self) -> None:
        """Give the slots back and end the link's threads; called once. The connection closes the arena."""


@dataclass(frozen=True)
class Ticket:
    """A request in flight: where it stands and which answer belongs to it."""

    slot: int
    request_id: int
    rows: int


@dataclass(frozen=True, eq=False)
class Result:
    """An answer that was copied out of its slot.

    Attributes:
        header: Status, detail.
        part_RH: float32 (R, H), or None where the status is not OK.
    """

    header: ResultHeader
    part_RH: torch.Tensor | None


class Connection:
    """The client's end. Methods may be called from several threads.

    A slot is in one place at a time: free, with a ticket (being written, or waited for), abandoned, or gone
    with the connection. A ticket ends with `poll` (an answer or an error) or with `abandon`.

    Args:
        server_id: Server at the other end.
        incarnation: Which life of that server.
        link: From a transport.
        hidden_size: H of the model.
        spin_us: Microseconds to poll before sleeping.
        on_lost: Called once, with this connection, when it is lost.
        on_closed: Called once, when the link is closed.
        metrics: Counts late answers.
    """

    _request_ids = itertools.count(1)

    def __init__(
        self,
        server_id: str,
        incarnation: int,
        link: Link,
        hidden_size: int,
        spin_us: int,
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
        self._on_lost = on_lost
        self._on_closed = on_closed
        self._metrics = metrics
        # Held for moments only, and never while another lock is taken.
        self._lock = threading.Lock()
        self._free = list(range(link.first_slot, link.first_slot + link.slots))
        self._tickets: set[Ticket] = set()
        self._abandoned: set[int] = set()
        self._closing = False
        self._unlinked = False

    # -- state ----------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """Slots that wait for an answer, abandoned ones too."""
        return self._link.slots - len(self._free)

    def max_tokens(self, top_k: int, dtype: torch.dtype) -> int:
        """Tokens that one slot takes. Raises WrongRequestError for a dtype that the wire lacks."""
        arena = self._link.arena
        return max_tokens(
            arena.payload_capacity,
            arena.result_capacity,
            self._hidden_size,
            top_k,
            _wire_dtype(dtype),
        )

    def owes_answer(self) -> bool:
        """Whether an abandoned request is still unanswered: the server is stuck, or gone unseen."""
        if not self._abandoned:
            return False
        with self._lock:
            if not self._unlinked:
                self._reclaim_late()
            return bool(self._abandoned)

    def lose(self, reason: str) -> None:
        """Declare the connection lost and wake whoever waits on it. Idempotent."""
        with self._lock:
            if self.lost_reason is not None:
                return
            self.lost_reason = reason
        self.wake()
        self._on_lost(self)

    def wake(self) -> None:
        """Make a `wait` return, so that its caller looks around."""
        with self._lock:
            if not self._unlinked:
                self._flags.interrupt(self._link.reply_bell)

    def close(self) -> None:
        """Lose the connection and give its slots back. Idempotent.

        Whoever holds a ticket finds the connection lost; the memory goes with the last ticket.
        """
        self.lose("closed")
        with self._lock:
            if self._closing:
                return
            self._closing = True
        self._link.close()
        with self._lock:
            self._unlinked = True
            self._let_go()
        self._on_closed()

    # -- one exchange ---------------------------------------------------------------------------------

    def submit(
        self,
        layer: int,
        epoch: int,
        x_RH: torch.Tensor,
        ids_RK: npt.NDArray[np.int32],
        scores_RK: npt.NDArray[np.float32],
        budget_s: float,
    ) -> Ticket:
        """Write a request into a free slot and hand it to the server.

        Args:
            layer: MoE layer.
            epoch: The placement's version that led here.
            x_RH: Hidden states (R, H) in a dtype of the wire.
            ids_RK: int32 (R, K), -1 where the pair is not this server's.
            scores_RK: float32 (R, K).
            budget_s: Time that the answer is worth waiting for.

        R is at most `max_tokens`.

        Raises:
            SlotsBusyError: Every slot waits for an answer.
            ConnectionLostError: The server is gone.
            WrongRequestError: Another hidden size than the model's, or a dtype that the wire lacks.
        """
        rows, top_k = ids_RK.shape
        dtype = _wire_dtype(x_RH.dtype)
        if x_RH.shape != (rows, self._hidden_size):
            raise WrongRequestError(
                f"hidden states {tuple(x_RH.shape)}, wanted {(rows, self._hidden_size)}"
            )
        header = RequestHeader.of(
            dtype=dtype,
            generation=self._link.generation,
            request_id=next(self._request_ids),
            epoch=epoch,
            budget_us=int(budget_s * 1e6),
            layer=layer,
            batch_size=rows,
            hidden_size=self._hidden_size,
            top_k=top_k,
        )
        ticket = self._take_slot(header.request_id, rows)
        arena, slot = self._link.arena, ticket.slot
        # A process that slept through the loss of its slots would write into another client's.
        if arena.generation(slot) != self._link.generation:
            raise self._taken_back(ticket)
        offset = arena.request_offset(slot)
        try:
            hidden_view, ids_view, scores_view = request_views(arena.buffer, offset, header)
            raw = x_RH.view(torch.uint16) if dtype is WireDtype.BFLOAT16 else x_RH
            np.copyto(hidden_view, raw.numpy(), casting="no")
            ids_view[...] = ids_RK
            scores_view[...] = scores_RK
            header.pack_into(arena.buffer, offset)
        except BaseException:  # A signal handler's, mostly: nothing was handed over yet.
            self._end(ticket, free=True)
            raise
        if not arena.client_write_done(slot):
            raise self._taken_back(ticket)
        self._link.kick(slot)
        return ticket

    def seq(self) -> int:
        """The reply bell's count; pass it to `wait`, look at what may have changed between the two."""
        return self._flags.seq(self._link.reply_bell)

    def wait(self, ticket: Ticket, seen_seq: int, timeout_s: float) -> None:
        """Sleep until the ticket is answered, the bell counts past `seen_seq` or the time is over."""
        self._flags.wait(
            ticket.slot,
            1,
            _ANSWERED,
            self._link.reply_bell,
            seen_seq,
            self._spin_us,
            max(0, int(timeout_s * 1e6)),
        )

    def poll(self, ticket: Ticket) -> Result | None:
        """Take the answer if it is there, and free its slot.

        Returns:
            The answer, None while there is none.

        Raises:
            ConnectionLostError: The server is gone, or took the slot back.
            SlotCorruptError: The answer is not one to this ticket; the slot is freed.
        """
        state = self._flags.load(ticket.slot)
        if state == SlotState.WRITTEN and self.lost_reason is None:
            return None
        if state != SlotState.DONE:
            raise self._taken_back(ticket)
        arena = self._link.arena
        offset = arena.result_offset(ticket.slot)
        # Copied first and judged afterwards: what the slot's next owner may write meanwhile is seen then.
        header = ResultHeader.unpack_from(arena.buffer, offset)
        copied_RH = result_view(arena.buffer, offset, ticket.rows, self._hidden_size).copy()
        if arena.generation(ticket.slot) != self._link.generation:
            raise self._taken_back(ticket)
        arena.client_free(ticket.slot)
        self._end(ticket, free=True)
        validate_result(
            header,
            result_capacity=arena.result_capacity,
            rows=ticket.rows,
            hidden_size=self._hidden_size,
            generation=self._link.generation,
            request_id=ticket.request_id,
        )
        return Result(header, torch.from_numpy(copied_RH) if header.rows else None)

    def abandon(self, ticket: Ticket) -> None:
        """Stop waiting. The slot comes back when the server answers; that answer is dropped. Idempotent."""
        with self._lock:
            if ticket in self._tickets:
                self._abandoned.add(ticket.slot)
                self._tickets.discard(ticket)
                self._let_go()

    # -- slots ----------------------------------------------------------------------------------------

    def _take_slot(self, request_id: int, rows: int) -> Ticket:
        with self._lock:
            if self.lost_reason is not None:
                raise ConnectionLostError(f"{self.server_id}: {self.lost_reason}")
            if not self._free:
                self._reclaim_late()
            if not self._free:
                raise SlotsBusyError(f"{self.server_id}: all {self._link.slots} slots in flight")
            ticket = Ticket(self._free.pop(), request_id, rows)
            self._tickets.add(ticket)
            return ticket

    def _taken_back(self, ticket: Ticket) -> ConnectionLostError:
        """End a ticket whose slot is not this connection's any more."""
        self.lose("the server took its slots back")
        self._end(ticket, free=False)
        return ConnectionLostError(f"{self.server_id}: {self.lost_reason}")

    def _end(self, ticket: Ticket, *, free: bool) -> None:
        with self._lock:
            self._tickets.discard(ticket)
            if free:
                self._free.append(ticket.slot)
            self._let_go()

    def _let_go(self) -> None:
        """Close the arena once nobody can touch it any more; the lock is held."""
        if self._unlinked and not self._tickets:
            self._link.arena.close()

    def _reclaim_late(self) -> None:
        for slot in tuple(self._abandoned):
            if self._flags.load(slot) == SlotState.DONE and self._link.arena.client_free(slot):
                self._abandoned.discard(slot)
                self._free.append(slot)
                self._metrics.late_answers.inc()


def _wire_dtype(dtype: torch.dtype) -> WireDtype:
    try:
        return WIRE_DTYPES[dtype]
    except KeyError:
        raise WrongRequestError(
            f"hidden states in {dtype}, the wire has {[*WIRE_DTYPES]}"
        ) from None
