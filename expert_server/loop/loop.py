"""The expert server's loop: poll, accept, batch, group, compute, reply (EaaS section 3.3).

The loop handles slots only, not the clients or transports behind them. It answers, and starts no exchange.

    scan for WRITTEN slots ---> accept ---> decide ---> compute a layer's batch, reply ---> scan again
                                              |
                                              +-------> wait for a larger batch ----------> scan again

A batch is one request or many. One is computed where it is, from its slot into its slot, if the kernel has
compiled layers. While no batch ever waits for others, the wait for requests is compiled too: it answers each
that is alone and plain by the same verbs (`slots.h`), so that no Python runs between two requests of a lone
client, and leaves all others to the turn of the loop.

A slot is claimed from accept to reply (`SlotTable` explains why no race is possible). If its grant is revoked
in that time, the request is dropped, before or after it is computed.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from eaas.log import get_logger
from eaas.types import ModelShape
from eaas.wire import Arena, SlotState
from eaas.wire.slot import DOORBELL, SlotLimits, Status
from expert_server.kernels import ExpertKernel
from expert_server.kernels.slot_kernel import SlotKernel
from expert_server.loop.batching import Batcher, Compute, Wait, create_batcher
from expert_server.loop.liveness import Liveness
from expert_server.loop.slots import Request, ServedSlots
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
        batches: Kernel calls that gave a result: the load report tells the balancer.
        epoch: Epoch of the placement, sent with STALE_PLACEMENT.
        expired: Requests whose time budget ended before they were computed.
        busy_s: Seconds spent on accepting and computing.
        slots: The slots, with the verbs that serve them.
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
        self._table = table
        self._kernel = kernel
        self._slot_kernel = kernel if isinstance(kernel, SlotKernel) else None
        self._spin_us = spin_us
        self._clock = clock
        self._traces = traces
        limits = SlotLimits(
            arena.payload_capacity, arena.result_capacity, shape.hidden_size, shape.num_layers
        )
        layers = kernel.direct if isinstance(kernel, ExpertKernel) else None
        self.slots = ServedSlots(arena, table, limits, layers)
        # Compiled code neither traces nor delays, and reads the clock itself.
        self._can_serve = (
            layers is not None
            and traces is None
            and not added_latency_s
            and clock is time.monotonic
        )
        self._batcher: Batcher[Grant, Request] = create_batcher(
            batching, batch_window_s, shape.num_layers
        )
        self._on_the_way = _AddedLatency(added_latency_s)
        self._table_changes = -1
        # Whether no batch waits for others, so that compiled code may serve.
        self._never_waits = False
        self._views = TensorViews(arena, shape.hidden_size)
        self._scratch = Scratch()
        # A plain flag: a signal handler may set it, and a lock there could deadlock.
        self._stopped = False
        # Cleared by a thread in `wait_idle`. The loop's check of it costs next to nothing.
        self._idle = threading.Event()
        self._idle.set()
        self._batch_ended_at = -math.inf
        self.batches = 0
        self.epoch = 0
        self.expired = 0
        self.busy_s = 0.0
        self.liveness = Liveness(clock())

    @property
    def computed(self) -> int:
        """Requests answered with a result, for the heartbeats' progress."""
        return self.slots.verbs.answered

    @property
    def refused(self) -> int:
        """Requests answered with an error, other than expired ones."""
        return self.slots.refused

    @property
    def requests(self) -> int:
        """Requests answered so far, with a result or an error: the progress that heartbeats report."""
        return self.computed + self.refused + self.expired

    @property
    def in_flight(self) -> int:
        """Requests accepted and not answered. Heartbeats report it; a leaving server waits for 0."""
        return self._table.busy.count(1)

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
        self.slots.verbs.leave()
        if self.is_busy:
            self._idle.wait(timeout_s)

    def stop(self) -> None:
        """Make `run` return after the current batch. Safe from any thread and from a signal handler."""
        self._stopped = True
        self.slots.verbs.leave()
        # Released flags: `run` has returned in the meantime, and nothing waits.
        with contextlib.suppress(ValueError):
            self._arena.flags.interrupt(DOORBELL)

    def run(self) -> None:
        """Answer requests until `stop`, in the server's main thread; then `close`.

        Raises DeviceLostError: the kernel's device has failed; the server ends, so that others answer.
        """
        flags = self._arena.flags
        try:
            with torch.inference_mode():
                while not self._stopped:
                    # Before the flag is checked: a later interrupt changes this count.
                    seen = flags.seq(DOORBELL)
                    if not self._stopped:
                        self.step(seen)
        finally:
            self.close()

    def close(self) -> None:
        """Drop all views of the arena, whose memory is freed with the last one. Idempotent."""
        self._views.clear()
        self.slots.verbs.close()

    def step(self, seen: int) -> None:
        """One turn of `run`: look for requests, accept new ones, then compute one batch or wait.

        Args:
            seen: The doorbell's count, read before the caller checked its own reasons to end the wait
                (`stop`).
        """
        arena, batcher = self._arena, self._batcher
        works_from = self._clock()
        if self.in_flight:
            self.liveness.turns(works_from)
            ready = arena.flags.scan(0, arena.slots, _WRITTEN)
        else:
            self.liveness.turns(works_from + _IDLE_US * 1e-6)
            if not self._idle.is_set() and not self.is_busy:
                self._idle.set()
            ready = self._wait_for_requests(seen)
            works_from = self._clock()
        if self._table_changes != self._table.changes:
            self._table_changes = self._table.changes
            grants = self._table.grants()
            batcher.keep(grants)
            self._never_waits = batcher.never_waits(len(grants))
        now = self._accept(ready)
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
        self._accept(ready)
        for layer in self._batcher.layers():
            self._answer(layer)

    # -- wait, accept ---------------------------------------------------------------------------------

    def _wait_for_requests(self, seen: int) -> list[int]:
        """Wait for requests; return their slots. Compiled code may answer some of them meanwhile."""
        flags, slots = self._arena.flags, self._arena.slots
        if not (self._can_serve and self._never_waits):
            return flags.wait(0, slots, _WRITTEN, DOORBELL, seen, self._spin_us, _IDLE_US)
        verbs = self.slots.verbs
        with self.liveness.compiled(verbs):
            served = verbs.serve(self._spin_us, _IDLE_US, _MOST_US, not self._idle.is_set())
        requests, seconds, slowest, slot, layer, tokens, began, ended = served
        if requests:
            self.batches += requests
            self.busy_s += seconds
            self.liveness.ended(1, slowest)
            # The policy learns from the last one.
            grant = self._table.owner(slot)
            if grant is not None:
                self._batcher.computed_alone(grant, layer, tokens, began, ended)
        return flags.scan(0, slots, _WRITTEN)

    def _accept(self, ready: list[int]) -> float:
        """Accept the requests in the slots that are not claimed yet, and let them join a batch.

        Returns the time.
        """
        now = self._clock()
        busy = self._table.busy
        for slot in ready:
            if not busy[slot] and (request := self.slots.accept(slot, now)) is not None:
                self._on_the_way.put(request)
        now = self._clock()
        for request in self._on_the_way.arrived(now):
            self._batcher.admit(request, request.grant, request.header.layer, now)
        return now

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
                # Its grant was revoked.
                self.slots.verbs.release(request.slot)
                continue
            if began >= request.expires_at:
                self.expired += 1
                self.slots.reply(request, Status.EXPIRED)
                continue
            groups.setdefault((header.top_k, header.dtype), []).append(request)
            tokens += header.batch_size
        for group in groups.values():
            if self._traces is None:
                self._compute(group)
            else:
                with self._traces.batch(group, began):
                    self._compute(group)
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
                self.slots.refuse(request, Status.INTERNAL)
            return
        self.batches += 1
        now = self._clock()
        start = 0
        for request in group:
            end = start + request.header.batch_size
            # The batches before this one were for other requests, and so is the rest of this one.
            from_s = max(request.admitted_at, self._batch_ended_at)
            own_s = (now - from_s) * request.header.batch_size / tokens
            if rows_TH is not None:
                np.copyto(self._views.result(request.slot, end - start), rows_TH[start:end])
            service_s = now - request.admitted_at
            self.slots.reply(request, Status.OK, 0, service_s, service_s - own_s)
            start = end
        self._batch_ended_at = now

    def _run(self, group: list[Request], layer: int) -> npt.NDArray[np.float32] | None:
        """Compute a batch; return its result, or None if it was computed into the slots."""
        if len(group) == 1 and self.slots.verbs.compute(group[0].slot):
            return None
        payloads = [self._views.tensors(request.slot, request.header) for request in group]
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
            _log.info("slot %d: %s", group[0].slot, error)
            self.slots.refuse(group[0], Status.STALE_PLACEMENT, self.epoch)
            return
        for request in group:
            self._compute([request])


class _AddedLatency:
    """Delays each request by a fixed time before the loop batches it, for experiments with distance.

    The loop sees a request so long after it was written; the server is not busy in that time.

    Args:
        seconds: The delay.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._requests: deque[Request] = deque()

    def put(self, request: Request) -> None:
        """Queue an admitted request; `arrived` returns it once its delay, from `admitted_at` on, is over."""
        self._requests.append(request)

    def arrived(self, now: float) -> list[Request]:
        """Remove and return the requests whose delay is over, for the batcher, as if admitted `now`."""
        arrived = []
        while self._requests and self._requests[0].admitted_at + self._seconds <= now:
            # The delay does not count as the server's time.
            arrived.append(self._requests.popleft()._replace(admitted_at=now))
        return arrived

    def next_at(self) -> float | None:
        """When the next delay is over, in monotonic seconds: the loop then wakes. None: no request."""
        return self._requests[0].admitted_at + self._seconds if self._requests else None
