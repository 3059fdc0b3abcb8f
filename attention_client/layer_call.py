"""One MoE layer's experts, computed elsewhere: dispatch, wait, hedge, fail over, combine.

A call ends before its deadline with the right tensor or with one typed error. A pair that got no answer is
sent to another replica, and only that pair; answers that come too late are dropped by their slot's request
id. Parts are summed in fp32 in a fixed order (server, first token), whatever order they came in.

What belongs to it: `shared` (what calls are given), `standing` (whom to ask), `sending` (from pairs to
requests), `answers` (from requests to results), `races` (hedges).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from attention_client import races
from attention_client.answers import learn, look
from attention_client.attempts import Attempt, Result
from attention_client.dispatch.parts import Part, combine, pairs_of, without
from attention_client.messages import LayerInput
from attention_client.outcomes import Outcome
from attention_client.sending import Sender
from attention_client.shared import ClusterView, Dispatcher, Replicas
from attention_client.standing import Standing
from attention_client.tracing import LayerTrace
from eaas.errors import EaasError, ExpertsUnavailableError

__all__ = ["ClusterView", "Dispatcher", "LayerCall", "Replicas"]

# Before servers that were busy, or failed in this call, are asked again. Busy ones free slots within
# microseconds; a placement or a membership that changes ends the pause at once.
_RETRY_S = 0.005
# How often all sides of a race are looked at.
_RACE_LOOK_S = 0.0005


class LayerCall:
    """One call of one layer. Make it, then `run` it, or `start` it and later `finish` it; once.

    Between `start` and `finish` the servers work and the caller does something else. A call that was
    started is ended by `finish` or by `cancel`: until then it holds slots.

    Args:
        dispatcher: Shared by all calls.
        inputs: Layer, hidden states, scores.
        ids_TK: int64, logical experts.
        wanted_TK: Pairs to compute; the others count as 0.
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
        # The compiled loops take them as they lie in memory.
        self._ids_TK = np.ascontiguousarray(ids_TK)
        self._wanted_TK = np.ascontiguousarray(wanted_TK)
        self._standing = Standing(dispatcher)
        # None while the call has not begun, and once it is over.
        self._sender: Sender | None = None
        self._deadline = math.inf
        # Pairs that nobody was asked for yet, or in vain; None: there are none.
        self._missing_TK: npt.NDArray[np.bool_] | None = None
        self._attempts: list[Attempt] = []
        self._results: list[Result] = []
        # Answers that come while another one is slept on, or between start and finish, come unseen.
        self._slept_on: Attempt | None = None
        self._all_seen = True
        self._trace: LayerTrace | None = None

    @property
    def pairs(self) -> int:
        """(token, expert) pairs to compute."""
        return int(np.count_nonzero(self._wanted_TK))

    def run(self) -> torch.Tensor:
        """Compute the layer: dispatch, wait, combine. Returns and raises what `finish` does."""
        self._begin()
        return self.finish()

    def start(self) -> None:
        """Send what can be sent at once, and return. The deadline counts from here.

        Takes one slot of each server at most: of the calls that were started, the one that is being
        finished must find slots for what it sends again. What needs more is sent by `finish`.

        Raises:
            WrongRequestError: The hidden states are not of the model's size.
        """
        sender = self._begin()
        self._all_seen = False
        try:
            view = self._shared.replicas.view()
            kept = self._standing.kept(view, self._shared.clock())
            sound_and_kept = _both(self._standing.sound(view), kept)
            self._send(sender, view, sound_and_kept, one_each=True)
        except BaseException:
            self.cancel()
            raise

    def finish(self) -> torch.Tensor:
        """Wait for what was started, hedge, fail over, combine.

        Returns:
            float32 (T, H): the weighted sum over the wanted pairs.

        Raises:
            ExpertsUnavailableError: The deadline passed while a pair had no answer.
            WrongRequestError: A server refused the request itself.
            RuntimeError: The call was not started, or is over.
        """
        sender = self._sender
        if sender is None:
            raise RuntimeError("the layer call was not started, or is over")
        try:
            while True:
                self._gather(sender)
                results = self._results
                out_TH = combine(self._inputs.x_TH.shape, [(r.part, r.part_RH) for r in results])
                # Every slot is to be released, whatever the others say.
                if all([result.release() for result in results]):
                    self._count_nonfinite(out_TH)
                    self._shared.witness.saw(results)
                    return out_TH
                # A slot was given to another client while it was read. Rare enough to begin anew.
                self._results, self._missing_TK = [], self._wanted_TK
        except EaasError as error:
            if self._trace is not None:
                self._trace.fail(str(error))
            raise
        finally:
            self.cancel()

    def _count_nonfinite(self, out_TH: torch.Tensor) -> None:
        # One sum tells of all. Where it only overflowed, no row is counted.
        if not math.isfinite(out_TH.sum().item()):
            rows = int((~out_TH.isfinite().all(dim=1)).sum())
            self._shared.metrics.nonfinite_rows.inc(rows)

    def cancel(self) -> None:
        """End a call that was started, without its result: its slots come back. Idempotent."""
        self._sender = None
        answered = [r for a in self._attempts if a.race is not None for r in a.race.answered]
        self._call_off(self._attempts, self._results + answered)
        self._results = []
        if self._trace is not None:
            self._trace.end()
            self._trace = None

    def _begin(self) -> Sender:
        self._deadline = self._shared.clock() + self._shared.timeout_s
        self._missing_TK = self._wanted_TK
        if self._shared.traces is not None:
            self._trace = self._shared.traces.layer(self._inputs.layer, len(self._ids_TK))
        self._sender = Sender(
            self._shared, self._standing, self._inputs, self._ids_TK, self._deadline, self._trace
        )
        return self._sender

    def _gather(self, sender: Sender) -> None:
        """Send and wait until there is a result for every wanted pair."""
        while self._missing_TK is not None or self._attempts:
            if self._missing_TK is not None:
                self._bank()
                self._dispatch(sender)
            if self._attempts:
                self._collect(sender)

    # -- dispatch -------------------------------------------------------------------------------------

    def _bank(self) -> None:
        """Free the slots of results: what is missing needs slots, too."""
        for result in tuple(self._results):
            if not result.bank():
                self._results.remove(result)
                self._miss(result.part)

    def _dispatch(self, sender: Sender) -> None:
        """Send missing pairs to the best of the servers that can be asked.

        Where nothing could be sent and nothing is in flight, returns after a pause.
        """
        now = self._shared.clock()
        if now >= self._deadline:
            raise self._unavailable()
        view = self._shared.replicas.view()
        sound, kept = self._standing.sound(view), self._standing.kept(view, now)
        self._send(sender, view, _both(sound, kept))
        if self._missing_TK is not None and not all(kept):
            # Where only an ejected server is left, it is better than one that failed just now.
            self._send(sender, view, sound)
        if self._attempts or self._missing_TK is None:
            return
        # Nobody else is left: those that failed once, or are slow, are better than nothing.
        if any(c in self._standing.avoided for c in view.connections):
            self._pause(view)
            if self._shared.replicas.view() is not view or self._shared.clock() >= self._deadline:
                return
        self._send(sender, view, view.usable())
        if not self._attempts:
            self._pause(view)

    def _send(
        self, sender: Sender, view: ClusterView, servers: Sequence[bool], *, one_each: bool = False
    ) -> None:
        """Send missing pairs to these servers, as far as they hold them and have free slots."""
        assert self._missing_TK is not None
        parts, complete = sender.plan(view, servers, self._missing_TK)
        if one_each:
            firsts = [p for i, p in enumerate(parts) if not i or parts[i - 1].server != p.server]
            complete = complete and len(firsts) == len(parts)
            parts = firsts
        sent = []
        for part in parts:
            attempt = sender.send(view, part)
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
        """A part is to be sent again."""
        part_TK = pairs_of(part, self._wanted_TK.shape)
        self._missing_TK = part_TK if self._missing_TK is None else self._missing_TK | part_TK

    def _pause(self, view: ClusterView) -> None:
        left_s = self._deadline - self._shared.clock()
        if any(view.usable()):
            left_s = min(left_s, _RETRY_S)
        self._shared.replicas.wait_for_change(view, max(left_s, 0.0))

    def _unavailable(self) -> ExpertsUnavailableError:
        experts = np.unique(self._ids_TK[self._missing_TK]).tolist()
        avoided = self._standing.avoided.values()
        reasons = sorted(set(avoided)) or ["no server that holds it could be asked"]
        return ExpertsUnavailableError(self._inputs.layer, experts, "; ".join(reasons))

    # -- collect --------------------------------------------------------------------------------------

    def _collect(self, sender: Sender) -> None:
        """Wait until at least one attempt ends; what became of it is in results and missing pairs then."""
        while True:
            first = self._attempts[0]
            seen = first.connection.seq()
            if self._settle():
                return
            now = self._shared.clock()
            until = math.inf
            for attempt in tuple(self._attempts):
                if attempt.hedge_at <= now:
                    self._hedge(sender, attempt)
            for attempt in self._attempts:
                until = min(until, attempt.expires_at, attempt.hedge_at)
                if attempt.race is not None:
                    # Whoever is first ends the race, and only one of them can be watched.
                    until = min(until, now + _RACE_LOOK_S)
            self._slept_on, self._all_seen = first, False
            first.connection.wait(first.ticket, seen, until - now)

    def _settle(self) -> bool:
        """Look at all attempts, and draw the consequences for those that have ended. Says whether one has."""
        answered = []
        ended = again = False
        for attempt in tuple(self._attempts):
            if attempt not in self._attempts:
                continue  # The end of another one was its end, too.
            found = look(attempt, self._inputs.layer, self._shared, self._standing)
            if found is None:
                continue
            ended = True
            self._attempts.remove(attempt)
            if attempt.trace is not None:
                attempt.trace.end("answered" if isinstance(found, Result) else "failed")
            if isinstance(found, Result):
                answered.append(attempt)
                self._settle_answered(attempt, found)
            elif attempt.race is not None:
                self._follow(races.settle_failed(attempt.race, attempt))
            else:
                again = True
                self._miss(attempt.part)
        # Where another one failed, the time says nothing about these.
        for attempt in () if again else answered:
            learn(attempt, self._shared, exactly=self._all_seen or attempt is self._slept_on)
        return ended

    def _settle_answered(self, attempt: Attempt, result: Result) -> None:
        if attempt.race is None:
            self._results.append(result)
        else:
            self._follow(races.settle_answered(attempt.race, attempt, result))

    def _call_off(self, attempts: Iterable[Attempt], results: Iterable[Result]) -> None:
        """Nobody waits for these any more."""
        for attempt in tuple(attempts):
            attempt.connection.abandon(attempt.ticket, overdue=False)
            self._attempts.remove(attempt)
            if attempt.trace is not None:
                attempt.trace.end("called off")
        for result in results:
            result.release()

    # -- races ----------------------------------------------------------------------------------------

    def _hedge(self, sender: Sender, attempt: Attempt) -> None:
        """Ask other replicas for the same, if they have all of it and the budget allows it."""
        attempt.hedge_at = math.inf
        shared = self._shared
        view = shared.replicas.view()
        sound, kept = self._standing.sound(view), self._standing.kept(view, shared.clock())
        others = [c is not attempt.connection for c in view.connections]
        wanted_TK = pairs_of(attempt.part, self._wanted_TK.shape)
        parts, complete = sender.plan(view, _both(_both(sound, kept), others), wanted_TK)
        if not complete or not shared.hedges.spend(len(parts)):
            return
        rivals: list[Attempt] = []
        for part in parts:
            rival = sender.send(view, part)
            if rival is None:
                self._call_off(rivals, [])
                shared.hedges.give_back(len(parts) - len(rivals))
                return
            self._attempts.append(rival)
            rivals.append(rival)
        races.begin(attempt, rivals)

    def _follow(self, settled: races.Settled) -> None:
        """Do what the end of one side of a race asks for."""
        self._results += settled.results
        self._call_off(settled.call_off, settled.release)
        if settled.beaten is not None:
            self._attempts.remove(settled.beaten)
            settled.beaten.connection.abandon(settled.beaten.ticket, overdue=True)
            if settled.beaten.trace is not None:
                settled.beaten.trace.end("beaten by a hedge")
            self._standing.blame(settled.beaten.connection)
            self._shared.metrics.outcomes.count(settled.beaten.connection, Outcome.HEDGED_AWAY)
        if settled.outcome is not None:
            self._shared.metrics.hedges.labels(settled.outcome).inc()


def _both(some: Sequence[bool], others: Sequence[bool]) -> list[bool]:
    return [one and other for one, other in zip(some, others, strict=True)]
