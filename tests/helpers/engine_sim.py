"""A frontend's `EnginePool` with simulated engines, connections and time.

An engine's next token depends on the sequence's tokens and seed alone, so each answer is known beforehand.
Messages of a connection arrive in order, after random delays; a connection that breaks loses those that are
under way. Faults are calls: kill, stop, go_on, drain, cut, start.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from eaas.generation.errors import EngineStoppedError
from eaas.generation.sampling import Sampling
from eaas.generation.work import Delivery, Work
from frontend.engines.pool import Action, Cancel, Deliver, EngineInfo, EnginePool, Send

__all__ = ["EngineWorld", "answer_to", "work_of"]

END = 0
_VOCABULARY = 40
_TICK_S = 0.1
_REPORT_S = 0.1


def next_token(tokens: Sequence[int], prompt_length: int, seed: int) -> int:
    """The token that every engine gives a sequence."""
    data = f"{tokens}{prompt_length}{seed}".encode()
    return int.from_bytes(blake2b(data, digest_size=4).digest()) % _VOCABULARY


def work_of(
    name: str, tokens: Sequence[int], max_tokens: int, seed: int = 0, ends: bool = True
) -> Work:
    ends_with = (END,) if ends else ()
    prompt = list(tokens)
    return Work(name, prompt, len(prompt), max_tokens, ends_with, Sampling(seed=seed))


def answer_to(work: Work) -> list[int]:
    """The whole answer to a request, undisturbed."""
    tokens = list(work.tokens)
    while len(tokens) - work.prompt_length < work.max_tokens:
        tokens.append(next_token(tokens, work.prompt_length, work.sampling.seed))
        if tokens[-1] in work.end_tokens:
            break
    return tokens[work.prompt_length :]


@dataclass(eq=False)
class _Process:
    """An engine's process.

    Attributes:
        name: The engine's name in the pool.
        works: Attempts that it has.
        batch: Most attempts that it computes at a time.
        poison: Dies when it computes a prompt that begins with this token.
    """

    name: str
    step_s: float
    batch: int
    kind: tuple[str, ...]
    capacity: int | None
    works: dict[int, Work] = field(default_factory=dict)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    alive: bool = True
    stopped: bool = False
    draining: bool = False
    refuses: bool = False
    connection: int = 0
    arrives: float = 0.0


class EngineWorld:
    """Engines, connections and users of one frontend.

    Attributes:
        now: The time, in seconds.
        said: What each user got so far.
        ended: The errors of requests that ended; None: a whole answer.
        moves: Reasons of moves.
        resumed: Requests that went on elsewhere: id, reason, seconds without a token.
        pauses: The longest pause of each user between two tokens.
    """

    def __init__(self, seed: int, poison: int | None = None) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.said: dict[str, list[int]] = {}
        self.ended: dict[str, Exception | None] = {}
        self.moves: list[str] = []
        self.resumed: list[tuple[str, str, float]] = []
        self.pauses: dict[str, float] = {}
        self.trace: list[str] = []
        self.deaths = 0
        self._poison = poison
        self._last: dict[str, float] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._processes: dict[str, _Process] = {}
        self._connections = 0
        self._watched: dict[str, tuple[int, Callable[[], None]]] = {}
        self.pool = EnginePool(self.moves.append, lambda *each: self.resumed.append(each))
        self._every(_TICK_S, lambda: self._do(self.pool.tick(self.now)))

    # -- users ----------------------------------------------------------------------------------------

    def submit(self, work: Work) -> None:
        self.said[work.id], self._last[work.id] = [], self.now
        self._do(self.pool.submit(work, self.now))

    def cancel(self, work_id: str) -> None:
        self._do(self.pool.cancel(work_id))

    def at_token(self, work_id: str, count: int, call: Callable[[], None]) -> None:
        """Call something just after a user got so many tokens."""
        self._watched[work_id] = count, call

    # -- engines and faults ---------------------------------------------------------------------------

    def start(
        self,
        name: str,
        step_s: float = 0.02,
        batch: int = 8,
        kind: tuple[str, ...] = ("model", "1"),
        capacity: int | None = None,
    ) -> None:
        process = self._processes[name] = _Process(name, step_s, batch, kind, capacity)
        self._connect(process)
        self._every(step_s, lambda: self._step(process), lambda: process.alive)
        self._every(_REPORT_S, lambda: self._report(process), lambda: process.alive)

    def kill(self, name: str) -> None:
        self._log(f"kill {name}")
        self.deaths += 1
        process = self._processes.pop(name)
        process.alive = False
        self._break(process)

    def stop(self, name: str) -> None:
        self._log(f"stop {name}")
        self._processes[name].stopped = True

    def go_on(self, name: str) -> None:
        self._log(f"go on {name}")
        if name in self._processes:
            self._processes[name].stopped = False

    def drain(self, name: str) -> None:
        """Drain an engine, which ends when it has nothing to do."""
        self._log(f"drain {name}")
        process = self._processes[name]
        process.draining = True
        self._to_frontend(process, lambda: self._do(self.pool.drain(name, self.now)))

    def cut(self, name: str, seconds: float) -> None:
        """Break an engine's connection; a new one is made after some time."""
        self._log(f"cut {name}")
        process = self._processes[name]
        self._break(process)
        self._after(seconds, lambda: self._connect(process) if process.alive else None)

    def refuse(self, name: str, refuses: bool) -> None:
        self._processes[name].refuses = refuses

    def names(self) -> list[str]:
        return list(self._processes)

    # -- time -----------------------------------------------------------------------------------------

    def run(self, until: float) -> None:
        while self._events and self._events[0][0] <= until:
            self.now, _, call = heapq.heappop(self._events)
            call()
        self.now = until

    def run_to_end(self, works: Sequence[Work], until: float) -> None:
        """Run until these requests have ended, and for a while longer."""
        while self.now < until and not all(work.id in self.ended for work in works):
            self.run(self.now + 1.0)
        self.run(self.now + 5.0)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        self._after(seconds, call)

    def _after(self, seconds: float, call: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now + seconds, self._number, call))

    def _every(
        self, seconds: float, call: Callable[[], None], goes_on: Callable[[], bool] = lambda: True
    ) -> None:
        def again() -> None:
            if goes_on():
                call()
                self._after(seconds * self.random.uniform(0.9, 1.1), again)

        self._after(seconds, again)

    def _log(self, text: str) -> None:
        self.trace.append(f"{self.now:.4f} {text}")

    # -- connections ----------------------------------------------------------------------------------

    def _connect(self, process: _Process) -> None:
        for attempts in (process.works, process.tokens, process.begun):
            attempts.clear()
        self._connections += 1
        process.connection = self._connections
        process.arrives = self.now
        info = EngineInfo(process.name, process.kind, process.capacity)
        self._to_frontend(process, lambda: self._do(self.pool.join(info, self.now)))
        if process.draining:
            self._to_frontend(process, lambda: self._do(self.pool.drain(process.name, self.now)))

    def _break(self, process: _Process) -> None:
        # Nothing of the connection arrives any more; its end is seen at once.
        process.connection = 0
        self._do(self.pool.lose(process.name, self.now))

    def _to_frontend(self, process: _Process, call: Callable[[], None]) -> None:
        connection = process.connection
        process.arrives = max(process.arrives, self.now + self.random.uniform(0.0, 0.01))
        self._after(
            process.arrives - self.now,
            lambda: call() if process.connection == connection else None,
        )

    def _to_engine(self, name: str, call: Callable[[_Process], None]) -> None:
        process = self._processes.get(name)
        if process is None or not process.connection:
            return
        connection = process.connection

        def arrive() -> None:
            if process.connection != connection or not process.alive:
                return
            if process.stopped:
                self._after(0.01, arrive)
            else:
                call(process)

        # Of equal delays, so that they arrive in order.
        self._after(0.005, arrive)

    # -- the engines' side ----------------------------------------------------------------------------

    def _report(self, process: _Process) -> None:
        if not process.stopped and process.connection:
            self._to_frontend(process, lambda: self._do(self.pool.hear(process.name, self.now)))

    def _step(self, process: _Process) -> None:
        if process.stopped or not process.connection:
            return
        batch = [attempt for attempt in process.works if attempt in process.begun]
        for attempt in list(process.works):
            if len(batch) >= process.batch:
                break
            if attempt not in process.begun:
                process.begun.add(attempt)
                batch.append(attempt)
                self._deliver(process, attempt, Delivery([]))
        for attempt in batch:
            work = process.works[attempt]
            if work.tokens[0] == self._poison:
                self._after(0.05, lambda: self.kill(process.name) if process.alive else None)
                continue
            tokens = process.tokens[attempt]
            tokens.append(next_token(tokens, work.prompt_length, work.sampling.seed))
            count = len(tokens) - work.prompt_length
            finished = tokens[-1] in work.end_tokens or count >= work.max_tokens
            assert count <= work.max_tokens
            self._deliver(process, attempt, Delivery([tokens[-1]], finished))
            if finished:
                self._drop(process, attempt)
        if process.draining and not process.works:
            process.stopped = True  # once its last messages have arrived, it ends
            self._after(0.1, lambda: self.kill(process.name) if process.alive else None)

    def _deliver(self, process: _Process, attempt: int, delivery: Delivery) -> None:
        name = process.name
        self._to_frontend(
            process, lambda: self._do(self.pool.deliver(name, attempt, delivery, self.now))
        )

    def _drop(self, process: _Process, attempt: int) -> None:
        process.works.pop(attempt, None)
        process.tokens.pop(attempt, None)
        process.begun.discard(attempt)

    def _take(self, process: _Process, attempt: int, work: Work) -> None:
        if process.refuses or process.draining:
            error = EngineStoppedError("The engine takes no more requests.")
            self._deliver(process, attempt, Delivery([], finished=True, error=error))
            return
        process.works[attempt], process.tokens[attempt] = work, list(work.tokens)

    # -- the frontend's side --------------------------------------------------------------------------

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            self._log(str(action))
            if isinstance(action, Send):
                self._to_engine(
                    action.engine, lambda at, each=action: self._take(at, each.attempt, each.work)
                )
            elif isinstance(action, Cancel):
                self._to_engine(action.engine, lambda at, each=action: self._drop(at, each.attempt))
            else:
                self._give(action)

    def _give(self, action: Deliver) -> None:
        name, delivery = action.work_id, action.delivery
        assert name not in self.ended, "something was delivered after the end"
        if delivery.tokens:
            pause = self.now - self._last[name]
            self.pauses[name] = max(self.pauses.get(name, 0.0), pause)
            self._last[name] = self.now
            self.said[name] += delivery.tokens
        if delivery.finished:
            self.ended[name] = delivery.error
        count, call = self._watched.get(name, (-1, None))
        if call is not None and len(self.said[name]) >= count:
            del self._watched[name]
            call()
