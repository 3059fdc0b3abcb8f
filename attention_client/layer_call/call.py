"""A client's remote call of one MoE layer's routed experts: dispatch, wait, hedge, fail over, combine.

A call ends before its deadline with the right tensor or with one typed error. Only pairs without an answer
are sent to another replica; a late answer is recognised by its request id and dropped. Parts are summed in
fp32 in a fixed order (server, first token), regardless of their arrival order.

`LayerCall` does the I/O and decides nothing: `decisions` does. What many calls share is in `shared`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self, cast

import numpy as np
import numpy.typing as npt
import torch

from attention_client.connections.messages import LayerInput
from attention_client.dispatch.combine import combine
from attention_client.dispatch.parts import Part, pairs_of
from attention_client.exchange import Exchange
from attention_client.layer_call.decisions import (
    Attempt,
    Decisions,
    Ended,
    Failure,
    Servers,
    failure_of,
)
from attention_client.layer_call.shared import CallContext, ClusterView
from attention_client.telemetry.request_outcomes import Outcome
from eaas.errors import (
    ConnectionLostError,
    EaasError,
    ExpertsUnavailableError,
    SlotCorruptError,
    SlotsBusyError,
    WrongRequestError,
)
from eaas.telemetry.tracing import pack
from eaas.wire.slot import Status

if TYPE_CHECKING:
    from attention_client.connections.connection import Connection
    from eaas.telemetry.spans import ChildSpan

__all__ = ["Arguments", "LayerCall", "abandon"]

# Pause before asking again a server that was busy or failed in this call. A busy server frees slots within
# microseconds; a new placement or membership ends the pause at once.
_RETRY_S = 0.005


class Arguments(NamedTuple):
    """Arguments of a layer call. The tensors must not change before its end.

    Attributes:
        layer: MoE layer.
        x_TH: Hidden states in fp32, bf16 or fp16.
        ids_TK: Logical expert ids.
        scores_TK: Weights of the experts.
        wanted_T: bool; tokens to compute, others give 0. None: all.
    """

    layer: int
    x_TH: torch.Tensor
    ids_TK: torch.Tensor
    scores_TK: torch.Tensor
    wanted_T: torch.Tensor | None


class LayerCall:
    """One layer call, used once: `finish` alone, or `start` and later `finish`. As a context it is cancelled.

    The caller can do other work between `start` and `finish`. A started call holds slots until `finish` or
    `cancel`. The deadline counts from the construction.

    Args:
        shared: State shared by all calls.
        arguments: Arguments of the call.
        exchange: Requests that compiled code has sent for all wanted pairs; None: none.
        on_takeover: Called before their failures count: former answers must count first.
    """

    def __init__(
        self,
        shared: CallContext,
        arguments: Arguments,
        exchange: Exchange | None = None,
        on_takeover: Callable[[], None] = lambda: None,
    ) -> None:
        self._shared = shared
        self._arguments = arguments
        self._exchange = exchange
        self._on_takeover = on_takeover
        self._began = shared.clock()
        self._has_ended = False
        # What follows is set by `_begin`.
        self._decisions: Decisions | None = None
        self._inputs: LayerInput
        self._ids_TK: npt.NDArray[np.int64]
        self._wanted_TK: npt.NDArray[np.bool_]
        self._trace: ChildSpan | None = None
        # Only this attempt's arrival time is measured exactly.
        self._waited_on: Attempt | None = None
        self._times_exact = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def start(self) -> None:
        """Send the call's first requests without waiting for answers.

        Uses at most one slot of each server, so that another started call finds slots for its retries.
        `finish` sends the remaining requests.

        Raises:
            WrongRequestError: The hidden states are not of the model's size.
        """
        try:
            decisions = self._begin()
            self._times_exact = False
            view = self._shared.replicas.view()
            self._send(view, decisions.preferred(self._servers(view)), one_each=True)
        except BaseException:
            self.cancel()
            raise

    def finish(self) -> torch.Tensor:
        """Wait for the servers' answers, hedge late requests, resend failed ones, and sum the results.

        Returns:
            (T, H) in the dtype of the hidden states; the servers' parts are added in float32.

        Raises:
            ExpertsUnavailableError: The deadline passed while a pair had no answer.
            WrongRequestError: A server refused the request itself.
            RuntimeError: The call has ended.
        """
        if self._exchange is not None:
            try:
                out_TH = self._shared.finish(self._exchange)
            except BaseException:
                self.cancel()
                raise
            if out_TH is not None:
                self._exchange, self._has_ended = None, True
                return out_TH
        return self.recover()

    def recover(self) -> torch.Tensor:
        """Go on where compiled code could not. Returns and raises as `finish`."""
        if self._has_ended:
            raise RuntimeError("the layer call has ended")
        try:
            return self._sum(self._decisions or self._begin()).to(self._arguments.x_TH.dtype)
        except EaasError as error:
            if self._trace is not None:
                self._trace.fail(str(error))
            if isinstance(error, ExpertsUnavailableError):
                self._shared.metrics.unavailable.inc()
            raise
        finally:
            self.cancel()

    def cancel(self) -> None:
        """End the call: abandon its requests in flight and free its results' slots. Idempotent.

        Called by `finish` at its end, and by callers that may not finish.
        """
        self._has_ended = True
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            abandon(exchange)
        decisions, self._decisions = self._decisions, None
        if decisions is None:
            return
        in_flight, answered = decisions.take_all()
        self._call_off(in_flight)
        for attempt in answered:
            _release(attempt)
        if self._trace is not None:
            self._trace.end()
        self._shared.count.end()
        metrics = self._shared.metrics
        metrics.layer_calls.inc()
        metrics.pairs.inc(int(np.count_nonzero(self._wanted_TK)))
        metrics.layer_call_seconds.observe(self._shared.clock() - self._began)

    # -- stages ---------------------------------------------------------------------------------------

    def _begin(self) -> Decisions:
        """Prepare the call, or take over the requests that compiled code has sent; `cancel` must follow."""
        shared = self._shared
        layer, x_TH, ids_TK, scores_TK, wanted_T = self._arguments
        # The compiled loops need contiguous arrays.
        self._ids_TK = ids_TK.to(torch.int64).contiguous().numpy()
        self._wanted_TK = np.ones(self._ids_TK.shape, dtype=np.bool_)
        if wanted_T is not None:
            self._wanted_TK &= wanted_T.numpy()[:, None]
        self._inputs = LayerInput.of(layer, x_TH.contiguous(), scores_TK.to(torch.float32).numpy())
        exchange, self._exchange = self._exchange, None
        # None is left to take over if a slot was lost during the sum.
        attempts = [] if exchange is None else _attempts_of(exchange)
        self._began = min([self._began, *(attempt.sent_at for attempt in attempts)])
        self._decisions = Decisions(self._wanted_TK, self._began + shared.timeout_s, attempts)
        shared.count.begin()
        if attempts:
            self._times_exact = False
            self._on_takeover()
            self._count_sent(len(attempts))
        if shared.traces is not None:
            self._trace = shared.traces.layer(layer, len(self._ids_TK))
        return self._decisions

    def _sum(self, decisions: Decisions) -> torch.Tensor:
        """Send, collect and resend until every wanted pair has a result, and sum the results."""
        while True:
            while not decisions.is_complete:
                if decisions.missing_TK is not None:
                    self._copy_results_out()
                    self._dispatch()
                if decisions.in_flight:
                    self._collect()
            answered = decisions.answered
            results = [(a.part, a.part_RH) for a in answered if a.part_RH is not None]
            out_TH = combine(self._inputs.x_TH.shape, results)
            # Use a list, not a generator, because every slot has to be released.
            if all([_release(attempt) for attempt in answered]):
                self._count_nonfinite(out_TH)
                self._shared.attribution.saw(answered)
                return out_TH
            # A slot was granted to another client during the read. This is rare: start over.
            decisions.lost_results()

    def _count_nonfinite(self, out_TH: torch.Tensor) -> None:
        # Check all rows with one sum. If only the sum overflowed, no row is counted.
        if not math.isfinite(out_TH.sum().item()):
            rows = int((~out_TH.isfinite().all(dim=1)).sum())
            self._shared.metrics.nonfinite_rows.inc(rows)

    def _copy_results_out(self) -> None:
        """Free the slots of the results so far, because resending missing pairs needs free slots."""
        for attempt in tuple(self._state.answered):
            if attempt.holds_slot:
                assert attempt.part_RH is not None
                copied_RH = attempt.part_RH.copy()
                if not _release(attempt):
                    self._state.lost_result(attempt)
                attempt.part_RH = copied_RH

    # -- dispatch -------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Send missing pairs to the best available servers; pause if none takes any and none is in flight.

        Raises:
            ExpertsUnavailableError: The deadline has passed.
        """
        state, replicas, clock = self._state, self._shared.replicas, self._shared.clock
        if state.is_over(clock()):
            raise self._unavailable()
        view = replicas.view()
        servers = self._servers(view)
        self._send(view, state.preferred(servers))
        if state.missing_TK is not None and any(servers.ejected):
            self._send(view, state.healthy(servers))
        if state.in_flight or state.missing_TK is None:
            return
        # No other server is left, so ask those that failed in this call or owe an answer.
        if state.needs_pause(servers):
            self._pause(view)
            if replicas.view() is not view or state.is_over(clock()):
                return
        self._send(view, view.usable_S().tolist())
        if not state.in_flight:
            self._pause(view)

    def _send(self, view: ClusterView, allowed: Sequence[bool], *, one_each: bool = False) -> None:
        """Send missing pairs to the allowed servers that hold their experts and have free slots.

        The other pairs stay missing.
        """
        missing_TK = self._state.missing_TK
        assert missing_TK is not None
        parts, is_all = self._plan(view, allowed, missing_TK)
        if one_each:
            firsts = [p for i, p in enumerate(parts) if not i or parts[i - 1].server != p.server]
            is_all = is_all and len(firsts) == len(parts)
            parts = firsts
        attempts = []
        try:
            for part in parts:
                attempt = self._submit(view, part)
                if attempt is not None:
                    attempts.append(attempt)
        finally:
            # Also if a signal interrupts it: `cancel` must know what was sent.
            self._state.sent(attempts, is_all=is_all and len(attempts) == len(parts))
        self._count_sent(len(attempts))

    def _count_sent(self, requests: int) -> None:
        self._shared.hedges.earn(requests)
        self._shared.metrics.server_requests.inc(requests)

    def _plan(
        self, view: ClusterView, allowed: Sequence[bool], pairs_TK: npt.NDArray[np.bool_]
    ) -> tuple[list[Part], bool]:
        """Choose a server for each pair by the dispatch policy (`DispatchPolicy.plan`). Sends nothing."""
        shared, inputs = self._shared, self._inputs
        replicas = view.replicas(np.array(allowed, dtype=np.bool_))
        work = [0.0 if c is None else c.work_in_flight for c in view.connections]
        load = shared.speeds.load(view.placement.servers, work, shared.clock())
        most_T = view.max_tokens(self._ids_TK.shape[1], inputs.dtype)
        return shared.policy.plan(self._ids_TK, pairs_TK, replicas, load, most_T, inputs.layer)

    def _submit(self, view: ClusterView, part: Part) -> Attempt | None:
        """Write a part into a slot of its server, with a time budget. Returns None if it is busy or lost."""
        connection = view.connections[part.server]
        assert connection is not None
        shared, state, rows = self._shared, self._state, part.rows_R.size
        now, service = shared.clock(), connection.service
        usual_s = service.budget(rows, shared.attempt_timeout_s, state.left_s(now))
        budget_s = state.patience_s(connection, usual_s, now)
        trace = None
        if self._trace is not None and shared.traces is not None:
            trace = shared.traces.dispatch(self._trace, connection.server_id, rows)
        context = b"" if trace is None else pack(trace.context)
        try:
            ticket = connection.submit(self._inputs, view.placement.epoch, part, budget_s, context)
        except (ConnectionLostError, SlotsBusyError) as error:
            _end_trace(trace, "busy" if isinstance(error, SlotsBusyError) else "lost")
            return None
        hedge_s = service.hedge_s(rows)
        hedge_at = math.inf if hedge_s is None else now + hedge_s
        expires_at = now + budget_s
        return Attempt(
            part, connection, ticket, now, hedge_at, expires_at, trace=trace, spares=view.spares
        )

    def _pause(self, view: ClusterView) -> None:
        left_s = self._state.left_s(self._shared.clock())
        if view.usable_S().any():
            left_s = min(left_s, _RETRY_S)
        self._shared.replicas.wait_for_change(view, left_s)

    def _unavailable(self) -> ExpertsUnavailableError:
        experts = np.unique(self._ids_TK[self._state.missing_TK]).tolist()
        reasons = sorted(set(self._state.reasons.values()))
        why = "; ".join(reasons) or "no server that holds it is available"
        return ExpertsUnavailableError(self._inputs.layer, experts, why)

    # -- collect --------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Wait until a request in flight ends, hedging late ones."""
        state, clock = self._state, self._shared.clock
        while True:
            first = state.in_flight[0]
            seen = first.connection.seq()
            if self._poll_all():
                return
            now = clock()
            for attempt in state.late(now):
                self._hedge(attempt)
            self._waited_on, self._times_exact = first, False
            first.connection.wait(first.ticket, seen, state.due_at(now) - now)

    def _poll_all(self) -> bool:
        """Look at all requests in flight, and learn from those that were answered. Returns if any ended."""
        answered = []
        ended = again = False
        for attempt in tuple(self._state.in_flight):
            if attempt not in self._state.in_flight:
                continue  # It was called off when its hedge ended.
            found = self._poll(attempt)
            if found is None:
                continue
            ended = True
            if attempt.part_RH is not None:
                _end_trace(attempt.trace, "answered")
                answered.append(attempt)
            else:
                _end_trace(attempt.trace, "failed")
                again = again or attempt.hedge is None
            self._carry_out(found)
        # If another request failed, these times are not representative.
        for attempt in () if again else answered:
            self._learn(attempt, exactly=self._times_exact or attempt is self._waited_on)
        return ended

    def _poll(self, attempt: Attempt) -> Ended | None:
        """Look once whether a request was answered or has failed. Returns what to do; None: in flight.

        Raises:
            WrongRequestError: The server refused the request itself.
        """
        shared, connection = self._shared, attempt.connection
        name = connection.server_id
        try:
            answer = connection.poll(attempt.ticket)
        except ConnectionLostError as error:
            return self._failed(attempt, Failure.LOST, str(error))
        except SlotCorruptError as error:
            return self._failed(attempt, Failure.CORRUPT, f"{name}: {error}")
        now = shared.clock()
        if answer is None:
            if now < attempt.expires_at:
                return None
            connection.abandon(attempt.ticket, overdue=True)
            waited_ms = (now - attempt.sent_at) * 1e3
            return self._failed(
                attempt, Failure.TIMEOUT, f"{name}: no answer in {waited_ms:.0f} ms"
            )
        header = answer.header
        if answer.part_RH is not None:
            attempt.part_RH, attempt.holds_slot = answer.part_RH, True
            shared.ejections.answered(name)
            shared.metrics.outcomes.count(connection, Outcome.ANSWERED)
            if header.service_us:
                pairs = float(np.count_nonzero(attempt.part.pairs_RK))
                service_s, queue_s = header.service_us * 1e-6, header.queue_us * 1e-6
                shared.speeds.observe(
                    name, attempt.part.work, service_s, now, pairs=pairs, queue_s=queue_s
                )
            return self._state.ended(attempt)
        status = Status(header.status)
        failure = failure_of(status, has_spares=bool(attempt.spares.of(name)))
        if failure is None:
            shared.metrics.outcomes.count(connection, Outcome.REFUSED)
            raise WrongRequestError(f"{name} refused a request of layer {self._inputs.layer}")
        if failure is Failure.SPARE_GONE:
            shared.on_stale(name, attempt.spares)
        return self._failed(attempt, failure, f"{name}: answered {status.name}")

    def _failed(self, attempt: Attempt, failure: Failure, reason: str) -> Ended:
        metrics = self._shared.metrics
        metrics.outcomes.count(attempt.connection, failure.outcome)
        metrics.failovers.labels(failure.label).inc()
        return self._state.ended(attempt, failure, reason)

    def _learn(self, attempt: Attempt, *, exactly: bool) -> None:
        """Update the server's usual times, and eject a server that is far too slow.

        `exactly`: the answer came just now; otherwise the measured time is only an upper bound.
        """
        now = self._shared.clock()
        service, rows = attempt.connection.service, attempt.part.rows_R.size
        observe = service.observe if exactly else service.observe_bound
        observe(rows, now - attempt.sent_at)
        self._shared.eject_if_slow(attempt.connection.server_id, now)

    def _carry_out(self, ended: Ended) -> None:
        """Do what was decided when a request ended."""
        shared = self._shared
        self._call_off(ended.call_off)
        for attempt in ended.unused:
            _release(attempt)
        if (beaten := ended.beaten) is not None:
            beaten.connection.abandon(beaten.ticket, overdue=True)
            _end_trace(beaten.trace, "beaten by a hedge")
            shared.metrics.outcomes.count(beaten.connection, Outcome.HEDGED_AWAY)
        for connection in ended.blamed:
            servers = shared.replicas.view().placement.servers
            if shared.ejections.failed(connection.server_id, servers, shared.clock()):
                shared.metrics.ejections.labels("failures").inc()
        if ended.hedge is not None:
            shared.metrics.hedges.labels(ended.hedge).inc()

    def _hedge(self, late: Attempt) -> None:
        """Also send a late request's part to other replicas.

        Does nothing if they do not hold all of it, have no free slot, or the hedge budget is spent.
        """
        hedges, view = self._shared.hedges, self._shared.replicas.view()
        allowed = self._state.preferred(self._servers(view))
        others = [
            a and c is not late.connection for a, c in zip(allowed, view.connections, strict=True)
        ]
        parts, is_all = self._plan(view, others, pairs_of(late.part, self._wanted_TK.shape))
        if not is_all or not hedges.spend(len(parts)):
            return
        rivals: list[Attempt] = []
        try:
            for part in parts:
                rival = self._submit(view, part)
                if rival is None:
                    break
                rivals.append(rival)
        finally:
            if len(rivals) == len(parts):
                self._state.hedged(late, rivals)
            else:
                self._call_off(rivals)
                hedges.give_back(len(parts) - len(rivals))

    def _call_off(self, attempts: Iterable[Attempt]) -> None:
        """Stop waiting for these requests, whose answers are dropped."""
        for attempt in attempts:
            attempt.connection.abandon(attempt.ticket, overdue=False)
            _end_trace(attempt.trace, "called off")

    # -- state ----------------------------------------------------------------------------------------

    @property
    def _state(self) -> Decisions:
        assert self._decisions is not None
        return self._decisions

    def _servers(self, view: ClusterView) -> Servers:
        connections, now = view.connections, self._shared.clock()
        out = self._shared.ejections.out
        return Servers(
            connections,
            usable=view.usable_S().tolist(),
            owing=[c is not None and c.owes_answer() for c in connections],
            ejected=[out(server, now) for server in view.placement.servers],
        )


def _release(attempt: Attempt) -> bool:
    """Free the slot of a result that was read or is not needed. False: what was read is unusable."""
    # A hedge and its attempts form a reference cycle, which would keep this view, and so the arena of a
    # dead server, alive until the next garbage collection.
    attempt.part_RH = None
    held, attempt.holds_slot = attempt.holds_slot, False
    return not held or attempt.connection.release(attempt.ticket)


def _end_trace(trace: ChildSpan | None, outcome: str) -> None:
    if trace is not None:
        trace.attributes["eaas.outcome"] = outcome
        trace.end()


def abandon(exchange: Exchange) -> None:
    """Stop waiting for the requests of compiled code; their slots are freed once the servers answer."""
    for attempt in _attempts_of(exchange):
        attempt.connection.abandon(attempt.ticket, overdue=False)


def _attempts_of(exchange: Exchange) -> list[Attempt]:
    """Take over the requests of a call from compiled code."""
    attempts = []
    view = cast(ClusterView, exchange.view)
    for server, slot, request_id, rows, ids, work, *times in exchange.requests():
        rows_R = np.frombuffer(rows, np.int64)
        ids_RK = np.frombuffer(ids, np.int32).reshape(-1, exchange.top_k)
        connection: Connection | None = view.connections[server]
        assert connection is not None
        ticket = connection.adopt(slot, request_id, rows_R.size, work)
        sent_at, hedge_at, expires_at = times
        hedge_at = hedge_at if hedge_at < expires_at else math.inf
        part = Part(server, rows_R, ids_RK, work)
        attempts.append(
            Attempt(part, connection, ticket, sent_at, hedge_at, expires_at, spares=view.spares)
        )
    return attempts
