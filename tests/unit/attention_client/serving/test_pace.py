"""The probe of the machine's speed."""

from __future__ import annotations

import pytest

from attention_client.serving.generation import pace
from attention_client.serving.generation.pace import PaceProbe


def test_the_probe_runs_at_most_every_tenth_of_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 10.25, 10.0625, 10.125, 10.5])
    monkeypatch.setattr(pace.time, "perf_counter", lambda: next(now))
    probe = PaceProbe()
    assert probe.seconds() == 0.25
    assert probe.seconds() is None  # too early
    assert probe.seconds() == 0.375
