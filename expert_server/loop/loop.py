"""The expert server's loop: poll, admit, batch, group, compute, reply (EaaS section 3.3).

The loop handles slots only, not the clients or transports behind them. It answers, and starts no exchange.

    scan for WRITTEN slots ---> admit ---> decide ---> compute a layer's batch ---> scan again
                                              |
                                              +------> wait for a larger batch ---> scan again

A request that would be a batch of its own takes the direct path (`expert_server.loop.direct`): compiled code
answers it at once, with the same effect. For a lone client, compiled code also waits for the next request.

A slot is claimed from admission until its answer (`SlotTable` explains why no race is possible). If its
grant is revoked in that time, the request is dropped, before or after it is computed.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from eaas.errors import SlotCorruptError, WrongRequestError
from eaas.log import get_logger
from eaas.types import ModelShape
from eaas.wire import Arena, RequestHeader, SlotState
from eaas.wire.slot import DAMAGED, DOORBELL, SlotLimits, Status, validate_request
from expert_server.kernels import ExpertKernel
from expert_server.kernels.slot_kernel import SlotKernel
from expert_server.loop._direct import Direct
from expert_server.loop.batching import Batcher, Compute, Wait, create_batcher
from expert_server.loop.direct import create_direct
from expert_server.loop.latency import AddedLatency
from expert_server.loop.liveness import Liveness
from expert_server.loop.replies import Replies, Request
from expert_server.loop.tracing import BatchTraces
from expert_server.loop.views import Scratch, TensorViews
from expert_server.transports.slot_ownership import Grant, SlotTable

__all__ = ["ServeLoop"]

_log = get_logger(__name__)
_WRITTEN = SlotState.WRITTEN.mask
_NOTHING = 0
_ARRIVAL_POLL_US = 200
# Longest sleep of an idle loop. It only bounds how late a stop is noticed; work wakes the loop at once.
_IDLE_US = 1_000_000
# Longest time that compiled code serves before the loop looks at what else has changed.
_MOST_US = 20_000
# How long data may lag behind its flag, on a transport that does not order them.
_SETTLE_S = 1e-4


class ServeLoop:
    """The expert server's loop: answers the requests in the slots, until stopped.

    Args:
        arena: The server's arena.
        table: Slot ownership.
        kernel: Computes one batch per call.
        shape: The model's shape.
        spin_us: Microseconds to poll before sleeping.
        batching: See the setting `expert_server.batching`.
        batch_window_s: Longest wait for a larger batch.
        added_latency_s: Delay before each request is seen.
        clock: Monotonic seconds.
        traces: Records the spans of batches; None: no spans.

    Attributes:
        epoch: Epoch of the placement, sent with STALE_PLACEMENT.
        refused: Requests answered with an error.
        expired: Requests whose time budget ended before they were computed.
        busy_s: Seconds spent on admitting and computing.
        liveness: The loop's notes of its activity, for the watchdog.
    """

    def __init__(
        self,
        arena: Arena,
        table: SlotTable,
        kernel: ExpertKernel,
        shape: ModelShape,
        spin_us: int,
        batching: Literal["immediate", "window", "all"] = "immediate",
        batch_window_s: float = 0.0,
        added_latency_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        traces: BatchTraces | None = None,
    ) -> None:
        self._arena = arena
        self._buffer = arena.buffer
        self._table = table
        self._kernel = kernel
        self._slot_kernel = kernel if isinstance(kernel, SlotKernel) else None
        self._spin_us = spin_us
        self._clock = clock
        self._traces = traces
        self._limits = SlotLimits(
            arena.payload_capacity, arena.result_capacity, shape.hidden_size, shape.num_layers
        )
        self._batcher: Batcher[Grant, Request] = create_batcher(
            batching, batch_window_s, shape.num_layers
        )
        self._on_the_way = AddedLatency(added_latency_s)
        self._table_changes = -1
        # Whether no batch waits for others, so that compiled code may serve.
        self._never_waits = False
        self._views = TensorViews(arena, shape.hidden_size)
        self._scratch = Scratch()
        self._replies = Replies(arena, self._views)
        # The direct path neither traces nor delays, and reads the clock itself.
        is_plain = traces is None and not added_latency_s and clock is time.monotonic
        self._direct = create_direct(arena, table, kernel, self._limits) if is_plain else None
        # A plain flag: a signal handler may set it, and a lock there could deadlock.
        self._stopped = False
        # Claimed slots. Their flags stay WRITTEN until they are answered.
        self._admitted: set[int] = set()
        # Cleared by a thread in `wait_idle`. The loop's check of it costs next to nothing.
        self._idle = threading.Event()
        self._idle.set()
        self._computed = 0
        self._batches = 0
        self._batch_ended_at = -math.inf
        self.epoch = 0
        self.refused = 0
        self.expired = 0
        self.busy_s = 0.0
        self.liveness = Liveness(clock())

    @property
    def computed(self) -> int:
        """Requests answered with a result, for the heartbeats' progress; the direct path counts its own."""
        return self._computed + (self._direct.answered if self._direct else 0)

    @property
    def batches(self) -> int:
        """Kernel calls that gave a result: the load report tells the balancer."""
        return self._batches + (self._direct.answered if self._direct else 0)

    @property
    def requests(self) -> int:
        """Requests answered so far, with a result or an error: the progress that heartbeats report."""
        return self.computed + self.refused + self.expired

    @property
    def in_flight(self) -> int:
        """Requests admitted and not answered. Heartbeats report it; a leaving server waits for 0."""
        served = self._direct is not None and self._direct.doing[1] > 0
        return len(self._admitted) + served

    @property
    def is_busy(self) -> bool:
        """Whether a request waits in a slot or is computed; weight loads then pause. Safe from any thread."""
        # The flag is WRITTEN until the answer is there. A stopped loop may have no arena.
        return not self._stopped and bool(self._arena.flags.scan(0, self._arena.slots, _WRITTEN))

    def wait_idle(self, timeout_s: float) -> None:
        """Block a loading thread while a request waits or is computed, or until the timeout.

        One thread at a time.
        """
        # In this order: a loop that became idle before the clear is not busy.
        self._idle.clear()
        if self._direct is not None:
            self._direct.leave()
        if self.is_busy:
            self._idle.wait(timeout_s)

    def stop(self) -> None:
        """Make `run` return after the current batch. Safe from any thread and from a signal handler."""
        self._stopped = True
        if self._direct is not None:
            self._direct.leave()
        # Released flags: `run` has returned in the meantime, and nothing waits.
        with contextlib.suppress(ValueError):
            self._arena.flags.interrupt(DOORBELL)

    def run(self) -> None:
        """Answer requests until `stop`, in the server's main thread.

        Raises DeviceLostError: the kernel's device has failed; the server ends, so that others answer.
        """
        flags = self._arena.flags
        with torch.inference_mode():
            while not self._stopped:
                # Before the flag is checked: a later interrupt changes this count.
                seen = flags.seq(DOORBELL)
                if not self._stopped:
                    self.step(seen)
        # The arena's memory is freed with the last view of it.
        self._views.clear()
        if self._direct is not None:
            self._direct.release()

    def step(self, seen: int) -> None:
        """One turn of `run`: scan the slots, admit new requests, then compute one batch or wait.

        Args:
            seen: The doorbell's count, read before the caller checked its own reasons to end the wait
                (`stop`).
        """
        arena, batcher = self._arena, self._batcher
        turns_at = self._clock()
        is_alone = not self._admitted
        if is_alone:
            self.liveness.turns(turns_at + _IDLE_US * 1e-6)
            if not self._idle.is_set() and not self.is_busy:
                self._idle.set()
            if self._never_waits and self._direct is not None:
                ready = self._serve(self._direct)
            else:
                ready = arena.flags.wait(
                    0, arena.slots, _WRITTEN, DOORBELL, seen, self._spin_us, _IDLE_US
                )
            works_from = self._clock()
        else:
            self.liveness.turns(turns_at)
            ready = arena.flags.scan(0, arena.slots, _WRITTEN)
            works_from = turns_at
        if self._table_changes != self._table.changes:
            self._table_changes = self._table.changes
            grants = self._table.grants()
            batcher.keep(grants)
            self._never_waits = batcher.never_waits(len(grants))
        if ready:
            is_alone = is_alone and len(ready) == 1 and self._direct is not None
            if is_alone and self._answer_directly(ready[0], works_from):
                return
            self._admit(ready)
        now = self._clock()
        for request in self._on_the_way.arrived(now):
            batcher.admit(request, request.grant, request.header.layer, now)
        decision = batcher.decide(now)
        next_at = self._on_the_way.next_at()
        if isinstance(decision, Compute):
            self._answer(decision.layer)
            self.busy_s += self._clock() - works_from
        elif next_at is not None:
            # The slots of delayed requests are WRITTEN, so no flag can end this wait: poll for new ones.
            pause_us = min(int((next_at - now) * 1e6) + 1, _ARRIVAL_POLL_US)
            arena.flags.wait(0, arena.slots, _NOTHING, DOORBELL, seen, self._spin_us, pause_us)
        elif isinstance(decision, Wait):
            grant, wait_us = decision.connection, int((decision.until - now) * 1e6) + 1
            arena.flags.wait(
                grant.first_slot, grant.slots, _WRITTEN, DOORBELL, seen, self._spin_us, wait_us
            )

    def serve(self, ready: list[int]) -> None:
        """Answer the requests in these slots at once, layer by layer, without a scan or a wait; for tests."""
        self._admit(ready)
        now = self._clock()
        for request in self._on_the_way.arrived(now):
            self._batcher.admit(request, request.grant, request.header.layer, now)
        for layer in self._batcher.layers():
            self._answer(layer)

    # -- the direct path ------------------------------------------------------------------------------

    def _serve(self, direct: Direct) -> list[int]:
        """Let compiled code wait and answer; return the slots with requests that it left to this loop."""
        with self.liveness.compiled(direct):
            served = direct.serve(self._spin_us, _IDLE_US, _MOST_US, not self._idle.is_set())
        requests, seconds, slowest, slot, layer, tokens, began, ended = served
        if requests:
            self.busy_s += seconds
            self.liveness.ended(1, slowest)
            # The policy learns from the last one.
            grant = self._table.owner(slot)
            if grant is not None:
                self._batcher.computed_alone(grant, layer, tokens, began, ended)
        return self._arena.flags.scan(0, self._arena.slots, _WRITTEN)

    def _answer_directly(self, slot: int, now: float) -> bool:
        """Answer the only request there is in compiled code (`expert_server.loop.direct`).

        False if the request is not plain, or might wait for others. Then nothing has changed; admit it.

        Args:
            slot: Its slot.
            now: When it was first seen.
        """
        direct, batcher = self._direct, self._batcher
        assert direct is not None
        self._admitted.add(slot)
        grant = self._table.claim_one(slot)
        ended = None
        if grant is not None and (accepted := direct.accept(slot, grant.generation)):
            layer, tokens = accepted
            if batcher.computes_alone(grant, layer):
                self.liveness.begins(tokens, now)
                ended = direct.answer(grant.reply_bell, now)
        self._admitted.discard(slot)
        self._table.release_one(slot)
        if grant is None or ended is None:
            return False
        self.liveness.ended(tokens, ended - now)
        batcher.computed_alone(grant, layer, tokens, now, ended)
        self.busy_s += ended - now
        return True

    # -- admit ----------------------------------------------------------------------------------------

    def _admit(self, ready: list[int]) -> None:
        """Claim the slots that are not claimed yet; queue their requests for a batch, or refuse them."""
        new = [slot for slot in ready if slot not in self._admitted]
        if not new:
            return
        now = self._clock()
        self._admitted.update(new)
        settled = []
        for slot, grant in zip(new, self._table.claim(new), strict=True):
            request = self._accept(slot, grant, now)
            if request is None:
                settled.append(slot)
            else:
                self._on_the_way.put(request)
        if settled:
            self._release(settled)

    def _accept(self, slot: int, grant: Grant | None, now: float) -> Request | None:
        """Validate the request in a claimed slot; None if there is none, or it is invalid and was refused."""
        if grant is None:
            self._arena.server_offline(slot)
            return None
        if self._arena.flags.load(slot) != SlotState.WRITTEN:
            # Granted to another client between the scan and the claim; that client has written nothing yet.
            return None
        header, error = self._read(slot, grant)
        if isinstance(error, SlotCorruptError):
            # Perhaps the data lags behind its flag. Retry only once, because other requests wait.
            _settle()
            header, error = self._read(slot, grant)
        if error is not None:
            _log.warning("slot %d of %s: %s", slot, grant.client_id, error)
            # A wrong request fails on every server. The client sends a damaged one again.
            if isinstance(error, WrongRequestError):
                self._refuse(slot, grant, header, Status.INVALID_ARGUMENT)
            else:
                self._refuse(slot, grant, header, Status.INTERNAL, DAMAGED)
            return None
        views = self._views.tensors(slot, header)
        return Request(slot, grant, header, views, now, now + header.budget_us * 1e-6)

    def _read(
        self, slot: int, grant: Grant
    ) -> tuple[RequestHeader, SlotCorruptError | WrongRequestError | None]:
        """Copy the request header out of a slot; return it and the error that makes it invalid, if any."""
        offset = self._arena.request_offset(slot)
        header = RequestHeader.unpack_from(self._buffer, offset)
        limits = self._limits._replace(
            payload_capacity=grant.payload_capacity, result_capacity=grant.result_capacity
        )
        try:
            validate_request(self._buffer, offset, header, limits, grant.generation)
        except (SlotCorruptError, WrongRequestError) as error:
            return header, error
        return header, None

    def _release(self, slots: list[int]) -> None:
        self._admitted.difference_update(slots)
        self._table.release(slots)

    # -- compute --------------------------------------------------------------------------------------

    def _answer(self, layer: int) -> None:
        """Compute and answer all queued requests of a layer, in one batch for each width (K) and dtype.

        Requests of revoked slots are dropped; those whose time budget is over are answered EXPIRED.
        """
        requests = self._batcher.take(layer)
        began = self._clock()
        tokens = 0
        groups: dict[tuple[int, int], list[Request]] = {}
        for request in requests:
            header = request.header
            if self._arena.flags.load(request.slot) != SlotState.WRITTEN:
                continue  # Its grant was revoked after the admission.
            if began >= request.expires_at:
                self.expired += 1
                self._replies.error(request.slot, request.grant, header, Status.EXPIRED)
                continue
            groups.setdefault((header.top_k, header.dtype), []).append(request)
            tokens += header.batch_size
        for group in groups.values():
            if self._traces is None:
                self._compute(group)
            else:
                with self._traces.batch(group, began):
                    self._compute(group)
        self._release([request.slot for request in requests])
        ended = self._clock()
        if tokens:
            self._batcher.computed(tokens, ended - began)
            self.liveness.ended(tokens, ended - began)
        for request in requests:
            self._batcher.answered(request.grant, ended)

    def _compute(self, group: list[Request]) -> None:
        layer = group[0].header.layer
        tokens = sum(request.header.batch_size for request in group)
        self.liveness.begins(tokens, self._clock())
        try:
            rows_TH = self._run(group, layer)
        except LookupError as error:
            self._refuse_misplaced(group, error)
            return
        except (RuntimeError, ValueError, OSError, MemoryError) as error:
            # Includes a batch too large for the free memory; smaller ones may still fit.
            _log.exception("layer %d: %s", layer, error)
            for request in group:
                self._refuse(request.slot, request.grant, request.header, Status.INTERNAL)
            return
        self._batches += 1
        now = self._clock()
        start = 0
        for request in group:
            end = start + request.header.batch_size
            self._computed += 1
            # The batches before this one were for other requests, and so is the rest of this one.
            from_s = max(request.admitted_at, self._batch_ended_at)
            own_s = (now - from_s) * request.header.batch_size / tokens
            if rows_TH is not None:
                self._replies.rows(request, rows_TH[start:end])
            self._replies.result(request, now, own_s)
            start = end
        self._batch_ended_at = now

    def _run(self, group: list[Request], layer: int) -> npt.NDArray[np.float32] | None:
        """Compute a batch; return its result, or None if the kernel has written it into the slots."""
        payloads = [request.views for request in group]
        if self._slot_kernel is not None:
            results = [self._views.result_tensor(r.slot, r.header.batch_size) for r in group]
            self._slot_kernel.compute_slots([views.tensors for views in payloads], results, layer)
            return None
        views = payloads[0]
        if len(group) > 1:
            views = self._scratch.gather(payloads, group[0].header)
        return self._kernel(*views.tensors, layer).numpy()

    def _refuse_misplaced(self, group: list[Request], error: LookupError) -> None:
        """Handle a batch with an expert that is not held: refuse the request for it, answer the others.

        STALE_PLACEMENT and this server's epoch tell the client to send it elsewhere.
        """
        if len(group) == 1:
            request = group[0]
            _log.info("slot %d: %s", request.slot, error)
            self._refuse(
                request.slot, request.grant, request.header, Status.STALE_PLACEMENT, self.epoch
            )
            return
        for request in group:
            self._compute([request])

    def _refuse(
        self, slot: int, grant: Grant, header: RequestHeader, status: Status, detail: int = 0
    ) -> None:
        self.refused += 1
        self._replies.error(slot, grant, header, status, detail)


def _settle() -> None:
    time.sleep(_SETTLE_S)
