"""The course of a run: when it goes on, and what it keeps of that."""

from __future__ import annotations

from typing import Any

import pytest

from eaas.bench.stream import Answer
from eaas.chaos.check import check
from eaas.chaos.history import Asked, Census
from eaas.chaos.run import Settings, _Attack
from eaas.local.interrupt import Interrupt

RIGHT = Asked(0, 0.0, Answer(0.0, 1.0, "a", 1, (0.5, 1.0)))
SETTINGS = Settings(seed=1, seconds=90.0, kinds=("kill",))


def held(mib: float) -> dict[str, Census]:
    return {"attention-client": Census(1, int(mib * 2**20), 20, 8)}


@pytest.mark.parametrize(
    ("leak_mib", "settles_mib", "phases", "violations"),
    [
        # A heap that is warm, one that warms up, and two that leak: 20 KB a request, and far more.
        (0.0, (0, 0), 1, 0),
        (0.0, (8, 7), 2, 0),
        (20 / 1024, (2, 5), 2, 1),
        (0.2, (0, 0), 1, 1),
    ],
)
def test_a_short_run_goes_on_where_memory_has_grown(
    monkeypatch: pytest.MonkeyPatch,
    leak_mib: float,
    settles_mib: tuple[float, float],
    phases: int,
    violations: int,
) -> None:
    rates: list[float] = []
    requests = 0

    def under_load(_attack: Any, seconds: float, rate: float, *_: Any) -> tuple[Asked, ...]:
        nonlocal requests
        rates.append(rate)
        requests += int(seconds * rate)
        return (RIGHT,) * int(seconds * rate)

    def at_rest(*_: Any) -> dict[str, Census]:
        return held(350 + leak_mib * requests + sum(settles_mib[: len(rates)]))

    monkeypatch.setattr(_Attack, "_warm_up", lambda *_: None)
    monkeypatch.setattr(_Attack, "_settled", lambda _: held(350))
    monkeypatch.setattr(_Attack, "_under_load", under_load)
    monkeypatch.setattr(_Attack, "_at_rest", at_rest)
    with Interrupt() as interrupt:
        cluster: Any = None
        attack = _Attack(cluster, SETTINGS, None, interrupt, lambda _: None)
        history = attack.run(("a",), SETTINGS.kinds)
    assert rates == [4.0, 16.0][:phases]
    assert len(history.asked) == requests
    assert len(check(history)) == violations
