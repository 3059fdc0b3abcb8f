"""A client's remote call of one MoE layer's routed experts: dispatch, wait, hedge, fail over, combine.

A call ends before its deadline with the right tensor or with one typed error. Only pairs without an answer
are sent to another replica; a late answer is recognised by its request id and dropped. Parts are summed in
fp32 in a fixed order (server, first token), regardless of their arrival order.

Modules: `shared` (state that all calls share), `server_health` (which servers to ask), `sending` (pairs to
requests), `answers` (requests to results), `hedging` (duplicate requests).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from attention_client.connections.messages import LayerInput
from attention_client.dispatch.combine import combine
from attention_client.dispatch.parts import Part, pairs_of, without
from attention_client.layer_call import hedging
from attention_client.layer_call.answers import learn, poll
from attention_client.layer_call.attempts import Attempt, Result
from attention_client.layer_call.sending import Sender
from attention_client.layer_call.server_health import ServerHealth
from attention_client.layer_call.shared import ClusterView, Dispatcher, ViewSource
from attention_client.telemetry.request_outcomes import Outcome
from eaas.errors import EaasError, ExpertsUnavailableError

__all__ = ["ClusterView", "Dispatcher", "LayerCall", "ViewSource"]

# Pause before asking again a server that was busy or failed in this call. A busy server frees slots within
# microseconds; a new placement or membership ends the pause at once.
_RETRY_S = 0.005
# Interval between polls of a hedged request.
_HEDGE_POLL_S = 0.0005


class LayerCall:
    """One call of one MoE layer's routed experts, used once: either `run`, or `start` and later `finish`.

    The caller can do other work between `start` and `finish`. A started call holds slots until `finish` or
    `cancel`.

    Args:
        dispatcher: State shared by all calls.
        inputs: Layer, hidden states, scores.
        ids_TK: int64, logical experts.
        wanted_TK: Pairs to compute; others give 0.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        inputs: LayerInput,
        ids_TK: npt.NDArray[np.int64],
        wanted_TK: npt.NDArray[np.bool_],
    ) -> None:
        self._shared = dispatcher
        self._inputs = inputs
        # The compiled loops need contiguous arrays.
        self._ids_TK = np.ascontiguousarray(ids_TK)
        self._wanted_TK = np.ascontiguousarray(wanted_TK)
        self._server_health = ServerHealth(dispatcher)
        self._sender = Sender(dispatcher, self._server_health, inputs, self._ids_TK)
        self._running = False
        # Pairs still to send: new ones, and those whose attempt failed. None if there are none.
        self._missing_TK: npt.NDArray[np.bool_] | None = None
        self._attempts: list[Attempt] = []
        self._results: list[Result] = []
        # Only this attempt's arrival time is measured exactly.
        self._waited_on: Attempt | None = None
        self._times_exact = True

    def take_over(self, attempts: Sequence[Attempt], deadline: float) -> None:
        """Go on with requests that compiled code has sent for all wanted pairs; `finish` then ends the call.

        Args:
            attempts: The requests in flight.
            deadline: End of the call, monotonic seconds.
        """
        self._running = True
        self._times_exact = False
        self._sender.deadline = deadline
        self._attempts = list(attempts)
        for _ in attempts:
            self._shared.hedges.earn()
        self._shared.metrics.server_requests.inc(len(attempts))

    def run(self) -> torch.Tensor:
        """Compute the routed experts without overlap: send, wait, sum. Returns and raises as `finish`."""
        self._begin()
        return self.finish()

    def start(self) -> None:
        """Send the call's first requests without waiting for answers. The deadline counts from here.

        Uses at most one slot of each server, so that another started call finds slots for its retries.
        `finish` sends the remaining requests.

        Raises:
            WrongRequestError: The hidden states are not of the model's size.
        """
        self._begin()
        self._times_exact = False
        try:
            view = self._shared.replicas.view()
            self._send(view, self._preferred(view), one_each=True)
        except BaseException:
            self.cancel()
            raise

    def finish(self) -> torch.Tensor:
        """Wait for the servers' answers, hedge late requests, resend failed ones, and sum the results.

        Returns:
            float32 (T, H): the weighted sum over the wanted pairs.

        Raises:
            ExpertsUnavailableError: The deadline passed while a pair had no answer.
            WrongRequestError: A server refused the request itself.
            RuntimeError: The call was not started, or has ended.
        """
        if not self._running:
            raise RuntimeError("the layer call was not started, or has ended")
        try:
            while True:
                self._gather()
                results = self._results
                out_TH = combine(self._inputs.x_TH.shape, [(r.part, r.part_RH) for r in results])
                # Use a list, not a generator, because every slot has to be released.
                if all([result.release() for result in results]):
                    self._count_nonfinite(out_TH)
                    self._shared.attribution.saw(results)
                    return out_TH
                # A slot was granted to another client during the read. This is rare: start over.
                self._results, self._missing_TK = [], self._wanted_TK
        except EaasError as error:
            if self._sender.trace is not None:
                self._sender.trace.fail(str(error))
            raise
        finally:
            self.cancel()

    def _count_nonfinite(self, out_TH: torch.Tensor) -> None:
        # Check all rows with one sum. If only the sum overflowed, no row is counted.
        if not math.isfinite(out_TH.sum().item()):
            rows = int((~out_TH.isfinite().all(dim=1)).sum())
            self._shared.metrics.nonfinite_rows.inc(rows)

    def cancel(self) -> None:
        """End the call: abandon its requests in flight and free its results' slots. Idempotent.

        Called by `finish` at its end, and by callers that may not finish.
        """
        self._running = False
        answered = [r for a in self._attempts if a.hedge is not None for r in a.hedge.answered]
        self._call_off(self._attempts, self._results + answered)
        self._results = []
        if self._sender.trace is not None:
            self._sender.trace.end()
            self._sender.trace = None

    def _begin(self) -> None:
        self._running = True
        self._missing_TK = self._wanted_TK
        self._sender.deadline = self._shared.clock() + self._shared.timeout_s
        if self._shared.traces is not None:
            self._sender.trace = self._shared.traces.layer(self._inputs.layer, len(self._ids_TK))

    def _gather(self) -> None:
        """Send, collect and resend until every wanted pair has a result, which `finish` then sums."""
        while self._missing_TK is not None or self._attempts:
            if self._missing_TK is not None:
                self._free_slots()
                self._dispatch()
            if self._attempts:
                self._collect()

    # -- dispatch -------------------------------------------------------------------------------------

    def _free_slots(self) -> None:
        """Copy the results so far out of their slots, because resending missing pairs needs free slots.

        Pairs whose slot was taken back become missing again.
        """
        for result in tuple(self._results):
            if not result.copy_out():
                self._results.remove(result)
                self._miss(result.part)

    def _dispatch(self) -> None:
        """Send missing pairs to the best available servers.

        Pauses if nothing could be sent and nothing is in flight.

        Raises:
            ExpertsUnavailableError: The deadline has passed.
        """
        now = self._shared.clock()
        if now >= self._sender.deadline:
            raise self._unavailable()
        view = self._shared.replicas.view()
        healthy, kept = self._server_health.healthy(view), self._server_health.kept(view, now)
        self._send(view, _both(healthy, kept))
        if self._missing_TK is not None and not all(kept):
            # An ejected server is better than one that failed just now.
            self._send(view, healthy)
        if self._attempts or self._missing_TK is None:
            return
        # No other server is left, so ask those that failed in this call or owe an answer.
        if any(c in self._server_health.avoided for c in view.connections):
            self._pause(view)
            if (
                self._shared.replicas.view() is not view
                or self._shared.clock() >= self._sender.deadline
            ):
                return
        self._send(view, view.usable_S().tolist())
        if not self._attempts:
            self._pause(view)

    def _send(self, view: ClusterView, servers: Sequence[bool], *, one_each: bool = False) -> None:
        """Send missing pairs to the allowed servers that hold their experts and have free slots.

        The other pairs stay missing.
        """
        assert self._missing_TK is not None
        parts, complete = self._sender.plan(view, servers, self._missing_TK)
        if one_each:
            firsts = [p for i, p in enumerate(parts) if not i or parts[i - 1].server != p.server]
            complete = complete and len(firsts) == len(parts)
            parts = firsts
        sent = []
        for part in parts:
            attempt = self._sender.send(view, part)
            if attempt is not None:
                self._attempts.append(attempt)
                self._shared.hedges.earn()
                sent.append(part)
        self._shared.metrics.server_requests.inc(len(sent))
        if complete and len(sent) == len(parts):
            self._missing_TK = None
        else:
            self._missing_TK = without(self._missing_TK, sent)

    def _miss(self, part: Part) -> None:
        """Add a part's pairs to the missing ones, so that `_gather` sends them again."""
        part_TK = pairs_of(part, self._wanted_TK.shape)
        self._missing_TK = part_TK if self._missing_TK is None else self._missing_TK | part_TK

    def _preferred(self, view: ClusterView) -> list[bool]:
        """Return whether each server may get first requests or hedges: healthy in this call, not ejected."""
        health = self._server_health
        return _both(health.healthy(view), health.kept(view, self._shared.clock()))

    def _pause(self, view: ClusterView) -> None:
        left_s = self._sender.deadline - self._shared.clock()
        if view.usable_S().any():
            left_s = min(left_s, _RETRY_S)
        self._shared.replicas.wait_for_change(view, max(left_s, 0.0))

    def _unavailable(self) -> ExpertsUnavailableError:
        experts = np.unique(self._ids_TK[self._missing_TK]).tolist()
        avoided = self._server_health.avoided.values()
        reasons = sorted(set(avoided)) or ["no server that holds it is available"]
        return ExpertsUnavailableError(self._inputs.layer, experts, "; ".join(reasons))

    # -- collect --------------------------------------------------------------------------------------

    def _collect(self) -> None:
        """Wait until a request in flight ends, hedging late ones; update results and missing pairs."""
        while True:
            first = self._attempts[0]
            seen = first.connection.seq()
            if self._settle():
                return
            now = self._shared.clock()
            until = math.inf
            for attempt in tuple(self._attempts):
                if attempt.hedge_at <= now:
                    self._hedge(attempt)
            for attempt in self._attempts:
                until = min(until, attempt.expires_at, attempt.hedge_at)
                if attempt.hedge is not None:
                    # Either side of a hedge may answer first, but the wait below watches only one request.
                    until = min(until, now + _HEDGE_POLL_S)
            self._waited_on, self._times_exact = first, False
            first.connection.wait(first.ticket, seen, until - now)

    def _settle(self) -> bool:
        """Poll all requests in flight: keep results, miss failed parts, learn times. Returns if any ended."""
        answered = []
        ended = again = False
        for attempt in tuple(self._attempts):
            if attempt not in self._attempts:
                continue  # It was called off when its hedge ended.
            found = poll(attempt, self._inputs.layer, self._shared, self._server_health)
            if found is None:
                continue
            ended = True
            self._attempts.remove(attempt)
            attempt.end_trace("answered" if isinstance(found, Result) else "failed")
            if isinstance(found, Result):
                answered.append(attempt)
                self._settle_answered(attempt, found)
            elif attempt.hedge is not None:
                self._apply(hedging.settle_failed(attempt.hedge, attempt))
            else:
                again = True
                self._miss(attempt.part)
        # If another request failed, these times are not representative.
        for attempt in () if again else answered:
            exact = self._times_exact or attempt is self._waited_on
            learn(attempt, self._shared, exactly=exact)
        return ended

    def _settle_answered(self, attempt: Attempt, result: Result) -> None:
        if attempt.hedge is None:
            self._results.append(result)
        else:
            self._apply(hedging.settle_answered(attempt.hedge, attempt, result))

    def _call_off(self, attempts: Iterable[Attempt], results: Iterable[Result]) -> None:
        """Stop waiting for these requests, whose answers are dropped, and free the slots of these results."""
        for attempt in tuple(attempts):
            attempt.connection.abandon(attempt.ticket, overdue=False)
            self._attempts.remove(attempt)
            attempt.end_trace("called off")
        for result in results:
            result.release()

    # -- hedging --------------------------------------------------------------------------------------

    def _hedge(self, attempt: Attempt) -> None:
        """Also send a late request's part to other replicas; the side that answers first is used.

        Does nothing if they do not hold all of it or the hedge budget is spent.
        """
        attempt.hedge_at = math.inf
        shared = self._shared
        view = shared.replicas.view()
        others = [c is not attempt.connection for c in view.connections]
        wanted_TK = pairs_of(attempt.part, self._wanted_TK.shape)
        parts, complete = self._sender.plan(view, _both(self._preferred(view), others), wanted_TK)
        if not complete or not shared.hedges.spend(len(parts)):
            return
        rivals: list[Attempt] = []
        for part in parts:
            rival = self._sender.send(view, part)
            if rival is None:
                self._call_off(rivals, [])
                shared.hedges.give_back(len(parts) - len(rivals))
                return
            self._attempts.append(rival)
            rivals.append(rival)
        hedging.begin(attempt, rivals)

    def _apply(self, settled: hedging.Settled) -> None:
        """Carry out `hedging`'s instructions after one side of a hedge ended; blame a beaten server."""
        self._results += settled.results
        self._call_off(settled.call_off, settled.release)
        if settled.beaten is not None:
            self._attempts.remove(settled.beaten)
            settled.beaten.connection.abandon(settled.beaten.ticket, overdue=True)
            settled.beaten.end_trace("beaten by a hedge")
            self._server_health.blame(settled.beaten.connection)
            self._shared.metrics.outcomes.count(settled.beaten.connection, Outcome.HEDGED_AWAY)
        if settled.outcome is not None:
            self._shared.metrics.hedges.labels(settled.outcome).inc()


def _both(some: Sequence[bool], others: Sequence[bool]) -> list[bool]:
    return [one and other for one, other in zip(some, others, strict=True)]
