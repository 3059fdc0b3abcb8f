"""Which engine has which sequence. A sequence outlives the engines that it runs on.

    submit --> WAITING --(sent to an engine: a new attempt)--> RUNNING --> ended
                  ^                                               |
                  +---- its engine died, or another one is better-+

Pure: events and the time come in as calls, each of which returns the actions that follow. The frontend keeps
the tokens that were delivered. A sequence that moves goes on behind them, as one that an engine evicted does.

Fencing: each attempt has a number of its own, and what arrives for a former attempt is dropped. So nothing is
delivered twice, whatever a lost, stopped or cut off engine still sends.

An engine is READY, SUSPECT (it is silent for longer than it ever was) or DRAINING. One that has no sequence
says little: its silence is judged by the upper bound alone. Sequences leave the latter two states as soon as
a READY engine can go on with them. If there is none they stay, because an engine that was only slow still has
them. An engine whose connection broke, or whom the monitor calls dead, is lost: its sequences wait for
another one.
"""

from __future__ import annotations

import logging
import math
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial

from eaas.generation.errors import ApiError, EngineStoppedError
from eaas.generation.messages import IDLE_REPORT_S
from eaas.generation.work import Delivery, Work
from frontend.engines.choice import LeastTime

__all__ = ["Action", "Cancel", "Deliver", "EngineInfo", "EnginePool", "Send"]

_LOG = logging.getLogger(__name__)

# A sequence waits so long for an engine: for a process that is restarted and loads its model.
PATIENCE_S = 60.0
# Deaths of engines that delivered no token of a sequence, after which it is not tried again: it may be what
# kills them.
MOST_DEATHS = 2
# A sequence that no engine accepts is offered again after so long.
_RETRY_S = 1.0
# An engine is suspect after a silence of so many times its longest one, within these bounds.
_TIMES = 3.0
_LEAST_SILENCE_S, _MOST_SILENCE_S = 0.5, 3.0
# The longest silence is forgotten at this rate, by each message.
_FORGETTING = 0.99


@dataclass(frozen=True)
class EngineInfo:
    """What an engine tells a frontend when they connect.

    Attributes:
        name: The member's id and incarnation: another process has another name.
        kind: Digests of model and tokenizer, and the version of the engine. Only an engine of the same kind
            may go on with an answer.
        capacity: Most tokens of a sequence, prompt plus answer; None: no limit.
    """

    name: str
    kind: tuple[str, ...]
    capacity: int | None = None


@dataclass(frozen=True)
class Send:
    """Send an engine a sequence."""

    engine: str
    attempt: int
    work: Work


@dataclass(frozen=True)
class Cancel:
    """Tell an engine that an attempt's tokens are not wanted any more."""

    engine: str
    attempt: int


@dataclass(frozen=True)
class Deliver:
    """Give the user of a sequence what an engine delivered."""

    work_id: str
    delivery: Delivery


Action = Send | Cancel | Deliver


class _State(Enum):
    READY = "ready"
    SUSPECT = "suspect"
    DRAINING = "draining"


@dataclass(eq=False)
class _Engine:
    info: EngineInfo
    heard: float
    state: _State = _State.READY
    longest_silence_s: float = 0.0
    attempts: dict[int, _Sequence] = field(default_factory=dict)

    def hear(self, now: float) -> None:
        """Note a message; learn from the silence before it."""
        usual = 0.0 if self.attempts else IDLE_REPORT_S
        silence = now - self.heard - usual
        self.longest_silence_s = max(silence, self.longest_silence_s * _FORGETTING)
        self.heard = now

    def take(self, attempt: int, sequence: _Sequence, now: float) -> None:
        """Note a sequence that it gets; from the first one on it speaks often."""
        if not self.attempts:
            self.heard = now
        self.attempts[attempt] = sequence

    @property
    def suspect_at(self) -> float:
        """When the silence since the last message is longer than what is usual."""
        if not self.attempts:
            return self.heard + _MOST_SILENCE_S
        bound = _TIMES * self.longest_silence_s
        return self.heard + min(max(bound, _LEAST_SILENCE_S), _MOST_SILENCE_S)


@dataclass(eq=False)
class _Sequence:
    """A sequence that has not ended.

    Attributes:
        work: What its user submitted.
        answer: Its tokens so far.
        kind: Of the engines that may go on with the answer; None: it has no token yet, so any engine may.
        engine: The engine that has it, with the number of the attempt; None: it waits.
        submitted_at: When its user submitted it.
        waits_since: When it began to wait.
        begun: Whether the engine computes it, rather than keeping it in its queue.
        has_begun: Whether an engine ever did.
        heard_at: When something of it was last delivered.
        paused: Why it moved, and since when nothing was delivered; None: tokens were, since it moved.
        advanced: Whether this engine has delivered a token of it.
        deaths: Of engines that computed it and delivered no token of it, since its last token.
        scores_prompt: Whether the prompt's log-probabilities are still to be delivered.
        refused_by: Engines that did not accept it since its last token.
        retry_at: When it is offered to these again.
    """

    work: Work
    submitted_at: float
    waits_since: float
    # Four bytes a token: a stored int and its place in a list have 36.
    answer: array[int] = field(default_factory=partial(array, "I"))
    kind: tuple[str, ...] | None = None
    engine: _Engine | None = None
    attempt: int = 0
    begun: bool = False
    has_begun: bool = False
    heard_at: float = 0.0
    paused: tuple[str, float] | None = None
    advanced: bool = False
    deaths: int = 0
    scores_prompt: bool = False
    refused_by: set[str] = field(default_factory=set)
    retry_at: float = math.inf

    @property
    def is_complete(self) -> bool:
        """Whether its last token ends it. Then no engine is needed."""
        work, answer = self.work, self.answer
        ends = len(answer) > 0 and answer[-1] in work.end_tokens
        return ends or len(answer) >= work.max_tokens

    def rest(self) -> Work:
        """What an engine has to do: the same answer, behind the tokens that were delivered."""
        sampling = self.work.sampling
        if sampling.prompt_logprobs and not self.scores_prompt:
            sampling = replace(sampling, prompt_logprobs=False)
        tokens = array("I", self.work.tokens) + self.answer if self.answer else self.work.tokens
        return replace(self.work, tokens=tokens, sampling=sampling)

    def fits(self, engine: EngineInfo) -> bool:
        """Whether an engine may have it."""
        if self.kind is not None and engine.kind != self.kind:
            return False
        # The last token is never stored.
        longest = self.work.prompt_length + self.work.max_tokens - 1
        return engine.capacity is None or longest <= engine.capacity


class EnginePool:
    """The engines that a frontend is connected to, and the sequences that it has.

    Args:
        on_move: Called for each sequence that leaves an engine before its end, with the reason: "lost",
            "suspect", "draining" or "refused".
        on_pause: Called when a sequence goes on that had begun before it moved, with its id, the reason, and
            the seconds from the last delivery before the move to the next tokens.
    """

    def __init__(
        self,
        on_move: Callable[[str], None] = lambda _: None,
        on_pause: Callable[[str, str, float], None] = lambda *_: None,
    ) -> None:
        self._choice = LeastTime()
        self._on_move, self._on_pause = on_move, on_pause
        self._engines: dict[str, _Engine] = {}
        # In the order of their submission.
        self._sequences: dict[str, _Sequence] = {}
        self._last_attempt = 0

    def __len__(self) -> int:
        """Return how many sequences have not ended."""
        return len(self._sequences)

    @property
    def waiting(self) -> int:
        """Sequences that no engine has."""
        return sum(sequence.engine is None for sequence in self._sequences.values())

    @property
    def engines(self) -> list[EngineInfo]:
        """The engines that are connected, SUSPECT and DRAINING ones, too."""
        return [engine.info for engine in self._engines.values()]

    def is_ready(self) -> bool:
        """Whether an engine takes new sequences."""
        return any(each.state is _State.READY for each in self._engines.values())

    # -- engines --------------------------------------------------------------------------------------

    def join(self, info: EngineInfo, now: float) -> list[Action]:
        """Add an engine; it gets the sequences that wait, and those that leave others.

        If it is connected already, the former connection is lost.
        """
        actions = self.lose(info.name, now)
        self._engines[info.name] = _Engine(info, now)
        return [*actions, *self._place_waiting(now), *self._evacuate(now)]

    def hear(self, name: str, now: float) -> list[Action]:
        """Note that an engine lives. One that was suspect is ready again."""
        engine = self._engines.get(name)
        if engine is None:
            return []
        engine.hear(now)
        if engine.state is _State.SUSPECT:
            engine.state = _State.READY
            return [*self._place_waiting(now), *self._evacuate(now)]
        return []

    def drain(self, name: str, now: float) -> list[Action]:
        """Send an engine no more sequences, and move those that it has if another engine can take them."""
        engine = self._engines.get(name)
        if engine is None:
            return []
        engine.state = _State.DRAINING
        return self._evacuate(now)

    def lose(self, name: str, now: float, *, died: bool = True) -> list[Action]:
        """Remove an engine that is lost.

        Args:
            died: Whether its connection broke, which a request may have caused. False: the monitor lists it
                no more, so it left, or had too little processor time.
        """
        engine = self._engines.pop(name, None)
        if engine is None:
            return []
        actions: list[Action] = []
        for sequence in list(engine.attempts.values()):
            sequence.deaths += died and sequence.begun and not sequence.advanced
            self._detach(sequence, now, "lost")
            actions += self._place(sequence, now)
        self._choice.forget(name)
        return actions

    # -- sequences ------------------------------------------------------------------------------------

    def submit(self, work: Work, now: float) -> list[Action]:
        """Take a new sequence. It waits if no engine can have it now."""
        sequence = _Sequence(work, now, now)
        sequence.scores_prompt = work.sampling.prompt_logprobs
        self._sequences[work.id] = sequence
        return self._place(sequence, now)

    def cancel(self, work_id: str) -> list[Action]:
        """End a sequence whose tokens are not wanted any more; no effect on one that has ended."""
        sequence = self._sequences.pop(work_id, None)
        if sequence is None or sequence.engine is None:
            return []
        self._forget_attempt(sequence)
        return [Cancel(sequence.engine.info.name, sequence.attempt)]

    def deliver(self, name: str, attempt: int, delivery: Delivery, now: float) -> list[Action]:
        """Take what an engine delivers; that of a former attempt is dropped."""
        engine = self._engines.get(name)
        sequence = engine.attempts.get(attempt) if engine is not None else None
        if engine is None or sequence is None:
            return []
        if isinstance(delivery.error, EngineStoppedError):
            # The engine does not accept the attempt, or gives it up because it ends.
            self._detach(sequence, now, "refused")
            sequence.refused_by.add(name)
            sequence.retry_at = now + _RETRY_S
            return self._place(sequence, now)
        sequence.heard_at = now
        if not delivery.tokens and not delivery.finished:
            # It is computed from now on, and may be what kills the engine.
            sequence.begun = True
            if sequence.has_begun:
                return []
            sequence.has_begun = True
            delivery = replace(delivery, queued_s=now - sequence.submitted_at)
        if delivery.tokens:
            sequence.begun = sequence.advanced = True
            sequence.deaths, sequence.kind = 0, engine.info.kind
            sequence.refused_by.clear()
            sequence.answer.extend(delivery.tokens)
            self._resume(sequence, now)
            self._choice.delivered(attempt, len(delivery.tokens), now)
        if delivery.prompt_scores is not None:
            sequence.scores_prompt = False
        if delivery.finished:
            self._forget_attempt(sequence)
            del self._sequences[sequence.work.id]
        return [Deliver(sequence.work.id, delivery)]

    # -- time -----------------------------------------------------------------------------------------

    def tick(self, now: float) -> list[Action]:
        """Suspect engines that are silent, and give up sequences that have waited too long."""
        for engine in self._engines.values():
            if engine.state is _State.READY and now >= engine.suspect_at:
                engine.state = _State.SUSPECT
                _LOG.warning("%s is silent", engine.info.name)
        actions = self._evacuate(now)
        for sequence in list(self._sequences.values()):
            if sequence.engine is not None:
                continue
            if now >= sequence.waits_since + PATIENCE_S:
                reason = "No engine could take the request. Try again later."
                actions.append(self._fail(sequence, reason, "no_engine"))
            elif now >= sequence.retry_at:
                sequence.retry_at = math.inf
                sequence.refused_by.clear()
                actions += self._place(sequence, now)
        return actions

    # -- placement ------------------------------------------------------------------------------------

    def _place_waiting(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for sequence in list(self._sequences.values()):
            if sequence.engine is None:
                sequence.refused_by.clear()
                actions += self._place(sequence, now)
        return actions

    def _place(self, sequence: _Sequence, now: float) -> list[Action]:
        """Send a sequence that waits to an engine, end it, or let it wait."""
        if sequence.is_complete:  # the engine died between the last token and the end
            self._resume(sequence, now)
            del self._sequences[sequence.work.id]
            return [Deliver(sequence.work.id, Delivery([], finished=True))]
        if sequence.deaths >= MOST_DEATHS:
            reason = f"{MOST_DEATHS} engines died while they computed this request: "
            reason += "it is not tried again."
            return [self._fail(sequence, reason, "engines_died")]
        usable = self._usable(sequence)
        if not usable:
            return []
        work = sequence.rest()
        name = usable[0] if len(usable) == 1 else self._choice.choose(work, usable)
        self._last_attempt += 1
        self._choice.sent(name, self._last_attempt, work, now)
        sequence.engine, sequence.attempt = self._engines[name], self._last_attempt
        sequence.engine.take(sequence.attempt, sequence, now)
        return [Send(name, sequence.attempt, work)]

    def _usable(self, sequence: _Sequence) -> list[str]:
        """The engines that can take a sequence: READY ones, else SUSPECT ones."""
        fitting = [
            engine
            for name, engine in self._engines.items()
            if name not in sequence.refused_by and sequence.fits(engine.info)
        ]
        for state in (_State.READY, _State.SUSPECT):
            if found := [each.info.name for each in fitting if each.state is state]:
                return found
        return []

    def _evacuate(self, now: float) -> list[Action]:
        """Move sequences from SUSPECT and DRAINING engines to READY ones that can take them."""
        actions: list[Action] = []
        if not self.is_ready():
            return actions
        for engine in list(self._engines.values()):
            if engine.state is _State.READY:
                continue
            for attempt, sequence in list(engine.attempts.items()):
                ready = (each for each in self._engines.values() if each.state is _State.READY)
                if any(sequence.fits(each.info) for each in ready):
                    self._detach(sequence, now, engine.state.value)
                    actions.append(Cancel(engine.info.name, attempt))
                    actions += self._place(sequence, now)
        return actions

    def _detach(self, sequence: _Sequence, now: float, reason: str) -> None:
        """Take a sequence from its engine. Its patience begins anew if the engine had begun it."""
        self._forget_attempt(sequence)
        if sequence.begun:
            sequence.waits_since = now
            sequence.paused = sequence.paused or (reason, sequence.heard_at)
        sequence.engine = None
        sequence.begun = sequence.advanced = False
        self._on_move(reason)

    def _resume(self, sequence: _Sequence, now: float) -> None:
        if sequence.paused is not None:
            reason, since = sequence.paused
            sequence.paused = None
            self._on_pause(sequence.work.id, reason, now - since)

    def _forget_attempt(self, sequence: _Sequence) -> None:
        if sequence.engine is not None:
            del sequence.engine.attempts[sequence.attempt]
            self._choice.ended(sequence.attempt)

    def _fail(self, sequence: _Sequence, reason: str, code: str) -> Deliver:
        del self._sequences[sequence.work.id]
        error = ApiError(503, reason, code=code)
        return Deliver(sequence.work.id, Delivery([], finished=True, error=error))
