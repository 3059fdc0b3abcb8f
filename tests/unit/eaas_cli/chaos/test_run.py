"""The course of a run: when it goes on, and what it keeps of that."""

from __future__ import annotations

from typing import Any

import pytest

from eaas_cli.bench.load import Asked
from eaas_cli.bench.stream import Answer
from eaas_cli.chaos.check import check
from eaas_cli.chaos.history import Census, Settings
from eaas_cli.chaos.run import _Attack
from eaas_cli.local.interrupt import Interrupt

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
def test_a_short_run_sends_more_requests_if_memory_grew(
    monkeypatch: pytest.MonkeyPatch,
    leak_mib: float,
    settles_mib: tuple[float, float],
    phases: int,
    violations: int,
) -> None:
    requests: list[int] = []

    class Load:
        sent = 1440

        def stop(self, _patience_s: float) -> tuple[Asked, ...]:
            requests.append(self.sent)
            return (RIGHT,) * self.sent

    def under_load(*_: Any) -> tuple[Asked, ...]:
        requests.append(360)
        return (RIGHT,) * 360

    def at_rest(*_: Any) -> dict[str, Census]:
        return held(350 + leak_mib * sum(requests) + sum(settles_mib[: len(requests)]))

    monkeypatch.setattr(_Attack, "_warm_up", lambda *_: None)
    monkeypatch.setattr(_Attack, "_settled", lambda _: held(350))
    monkeypatch.setattr(_Attack, "_under_load", under_load)
    monkeypatch.setattr(_Attack, "_dense_load", lambda *_: Load())
    monkeypatch.setattr(_Attack, "_at_rest", at_rest)
    with Interrupt() as interrupt:
        cluster: Any = None
        attack = _Attack(cluster, SETTINGS, None, interrupt, lambda _: None)
        history = attack.run(("a",), SETTINGS.kinds)
    assert requests == [360, 1440][:phases]
    assert len(history.asked) == sum(requests)
    assert len(check(history)) == violations
