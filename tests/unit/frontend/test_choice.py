"""Which engine gets a sequence: each that has nothing to do, unless another one's cache saves more."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from engine_sim import work_of
from frontend.engines.choice import LeastTime

ENGINES = ("a", "b")


@dataclass
class Engines:
    """Equal engines whose steps take longer the more sequences they have."""

    step_s: float = 0.007
    each_s: float = 0.001
    choice: LeastTime = field(default_factory=LeastTime)
    running: dict[int, str] = field(default_factory=dict)
    now: float = 0.0
    attempts: int = 0

    def send(self, prompt: list[int], name: str | None = None) -> str:
        work = work_of(str(self.attempts), prompt, 64)
        name = name or self.choice.choose(work, ENGINES)
        self.attempts += 1
        self.choice.sent(name, self.attempts, work, self.now)
        self.running[self.attempts] = name
        return name

    def run(self, tokens: int) -> None:
        """Each engine delivers so many tokens of each of its sequences."""
        begun, ends = self.now, []
        for name, count in Counter(self.running.values()).items():
            for number in range(tokens):
                now = begun + (number + 1) * (self.step_s + count * self.each_s)
                ends.append(now)
                for attempt in [a for a, at in self.running.items() if at == name]:
                    self.choice.delivered(attempt, 1, now)
        self.now = max(ends)

    def end(self) -> None:
        for attempt in self.running:
            self.choice.ended(attempt)
        self.running.clear()


def test_an_engine_that_was_never_asked_gets_its_share() -> None:
    engines = Engines()
    engines.send([1, 2, 3], "a")
    engines.run(64)
    engines.end()
    for number in range(8):
        engines.send([number])
        engines.run(16)
    assert Counter(engines.running.values()) == {"a": 4, "b": 4}


def test_what_was_slow_under_load_is_asked_again_once_it_is_idle() -> None:
    engines = Engines(each_s=0.02)
    for number in range(6):
        engines.send([number], "b")
    engines.run(64)
    engines.end()
    engines.send([1], "a")
    engines.run(64)
    assert engines.send([2]) == "b"


def test_a_prompt_goes_where_its_beginning_is_unless_that_engine_is_much_busier() -> None:
    engines = Engines()
    for name in ENGINES:  # both are measured
        engines.send([9], name)
    engines.run(64)
    engines.end()
    long = list(range(6400))
    engines.send(long, "a")
    engines.send([8], "b")
    engines.run(64)
    assert engines.send([*long, 7]) == "a"
    for number in range(12):
        engines.send(list(range(10_000 * number, 10_000 * number + 9000)), "a")
    assert engines.send([*long, 7]) == "b"


def test_an_engine_that_is_lost_is_forgotten_with_its_cache() -> None:
    engines = Engines()
    long = list(range(640))
    engines.send(long, "a")
    engines.run(64)
    engines.end()
    engines.send([1], "a")
    engines.choice.ended(engines.attempts)
    engines.running.clear()
    engines.choice.forget("a")
    engines.send([2], "a")
    assert engines.send(long) == "b"
