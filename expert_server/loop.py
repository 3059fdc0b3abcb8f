"""The expert server's loop: poll, admit, batch, group, compute, reply (EaaS section 3.3).

It knows slots and nothing else: not who wrote them, nor what carried the bytes. It starts no exchange.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from eaas.errors import SlotCorruptError, WrongRequestError
from eaas.log import get_logger
from eaas.types import ModelShape
from eaas.wire import Arena, RequestHeader, ResultHeader, SlotState
from eaas.wire.slot import (
    DOORBELL,
    Status,
    WireDtype,
    request_views,
    result_view,
    validate_request,
)
from expert_server.kernels import ExpertKernel
from expert_server.slots import Grant, SlotTable

__all__ = ["ServeLoop"]

_log = get_logger(__name__)
_WRITTEN = SlotState.WRITTEN.mask
# Only bounds how late a stop is noticed; work wakes the loop at once.
_IDLE_US = 1_000_000


@dataclass(frozen=True, eq=False)
class _Request:
    """A request that was admitted: its header is valid and its views are made."""

    slot: int
    grant: Grant
    header: RequestHeader
    x_TH: torch.Tensor
    ids_TK: torch.Tensor
    scores_TK: torch.Tensor


class ServeLoop:
    """Answers whatever is written into the slots, until stopped.

    Args:
        arena: The server's arena.
        table: Who has which slots.
        kernel: Computes; a batch is one call.
        shape: Of the model.
        spin_us: Microseconds to poll before sleeping.
    """

    def __init__(
        self, arena: Arena, table: SlotTable, kernel: ExpertKernel, shape: ModelShape, spin_us: int
    ) -> None:
        self._arena = arena
        self._table = table
        self._kernel = kernel
        self._shape = shape
        self._spin_us = spin_us
        # A plain flag: a signal handler may set it, and taking a lock there could deadlock.
        self._stopped = False
        self.epoch = 0
        self.requests = 0
        self.in_flight = 0
        self._seen_at = 0.0

    def stop(self) -> None:
        """Make `run` return after the batch at hand. From any thread or signal handler."""
        self._stopped = True
        self._arena.flags.interrupt(DOORBELL)

    def run(self) -> None:
        """Serve until `stop`."""
        flags = self._arena.flags
        with torch.inference_mode():
            while not self._stopped:
                seen = flags.seq(DOORBELL)
                if self._stopped:
                    return
                ready = flags.wait(
                    0, self._arena.slots, _WRITTEN, DOORBELL, seen, self._spin_us, _IDLE_US
                )
                if ready:
                    self.serve(ready)

    def serve(self, ready: list[int]) -> None:
        """Answer all of these slots, one batch per layer. What is written meanwhile is the next round's."""
        self.in_flight = len(ready)
        self._seen_at = time.monotonic()
        self._table.set_busy(frozenset(ready))
        try:
            layers: dict[int, list[_Request]] = {}
            for slot in ready:
                request = self._admit(slot)
                if request is not None:
                    layers.setdefault(request.header.layer, []).append(request)
            for requests in layers.values():
                self._answer_layer(requests)
        finally:
            self.in_flight = 0
            self._table.set_busy(frozenset())

    # -- admit ----------------------------------------------------------------------------------------

    def _admit(self, slot: int) -> _Request | None:
        grant = self._table.owner(slot)
        if grant is None:
            self._arena.server_offline(slot)
            return None
        if self._arena.flags.load(slot) != SlotState.WRITTEN:
            # Handed to another client between the wait and `set_busy`; it has written nothing yet.
            return None
        offset = self._arena.request_offset(slot)
        header = RequestHeader.unpack_from(self._arena.buffer, offset)
        try:
            validate_request(
                header,
                payload_capacity=self._arena.payload_capacity,
                hidden_size=self._shape.hidden_size,
                result_capacity=self._arena.result_capacity,
                num_layers=self._shape.num_layers,
                generation=grant.generation,
            )
        except (SlotCorruptError, WrongRequestError) as error:
            _log.warning("slot %d of %s: %s", slot, grant.client_id, error)
            # A wrong request is wrong everywhere; one that was damaged on the way is to be sent again.
            wrong = isinstance(error, WrongRequestError)
            status = Status.INVALID_ARGUMENT if wrong else Status.INTERNAL
            self._refuse(slot, grant, header, status)
            return None
        hidden, ids, scores = request_views(self._arena.buffer, offset, header)
        x_TH = torch.from_numpy(hidden)
        if header.dtype == WireDtype.BFLOAT16:
            x_TH = x_TH.view(torch.bfloat16)
        return _Request(slot, grant, header, x_TH, torch.from_numpy(ids), torch.from_numpy(scores))

    # -- compute --------------------------------------------------------------------------------------

    def _answer_layer(self, requests: list[_Request]) -> None:
        """One batch of requests of the same layer. Widths (K) and dtypes may differ between clients."""
        groups: dict[tuple[int, torch.dtype], list[_Request]] = {}
        for request in requests:
            groups.setdefault((request.header.top_k, request.x_TH.dtype), []).append(request)
        for group in groups.values():
            self._compute(group)

    def _compute(self, group: list[_Request]) -> None:
        layer = group[0].header.layer
        if len(group) == 1:
            x_TH, ids_TK, scores_TK = group[0].x_TH, group[0].ids_TK, group[0].scores_TK
        else:
            x_TH = torch.cat([r.x_TH for r in group])
            ids_TK = torch.cat([r.ids_TK for r in group])
            scores_TK = torch.cat([r.scores_TK for r in group])
        try:
            out_TH = self._kernel(x_TH, ids_TK, scores_TK, layer)
        except LookupError as error:
            self._blame(group, error)
            return
        except (RuntimeError, ValueError, OSError, MemoryError) as error:
            # Also where there is no memory for a batch of this size: a smaller one may come.
            _log.exception("layer %d: %s", layer, error)
            for request in group:
                self._refuse(request.slot, request.grant, request.header, Status.INTERNAL)
            return
        start = 0
        for request in group:
            rows = request.header.batch_size
            self._reply(request, out_TH[start : start + rows])
            start += rows

    def _blame(self, group: list[_Request], error: LookupError) -> None:
        """An expert that is not here: refuse the request that asked for it, answer the others."""
        if len(group) == 1:
            request = group[0]
            _log.info("slot %d: %s", request.slot, error)
            self._refuse(request.slot, request.grant, request.header, Status.STALE_PLACEMENT)
            return
        for request in group:
            self._compute([request])

    # -- reply ----------------------------------------------------------------------------------------

    def _reply(self, request: _Request, out_TH: torch.Tensor) -> None:
        rows, hidden = out_TH.shape
        offset = self._arena.result_offset(request.slot)
        np.copyto(result_view(self._arena.buffer, offset, rows, hidden), out_TH.numpy())
        self._finish(request.slot, request.grant, request.header, Status.OK, rows, hidden)

    def _refuse(self, slot: int, grant: Grant, header: RequestHeader, status: Status) -> None:
        self._finish(slot, grant, header, status, 0, 0)

    def _finish(
        self,
        slot: int,
        grant: Grant,
        header: RequestHeader,
        status: Status,
        rows: int,
        hidden: int,
    ) -> None:
        result = ResultHeader.of(
            status=status,
            generation=grant.generation,
            request_id=header.request_id,
            rows=rows,
            hidden_size=hidden,
            detail=self.epoch if status is Status.STALE_PLACEMENT else 0,
            service_us=int((time.monotonic() - self._seen_at) * 1e6),
        )
        result.pack_into(self._arena.buffer, self._arena.result_offset(slot))
        self.requests += 1
        if self._arena.server_done(slot):
            self._arena.flags.ring(grant.reply_bell)
