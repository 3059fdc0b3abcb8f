"""The probe of the machine's pace."""

from __future__ import annotations

import pytest

from attention_client.serve import pace
from attention_client.serve.pace import PaceProbe


def test_it_takes_little_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 10.25, 10.0625, 10.125, 10.5])
    monkeypatch.setattr(pace.time, "perf_counter", lambda: next(now))
    probe = PaceProbe()
    assert probe.seconds() == 0.25
    assert probe.seconds() is None  # too early
    assert probe.seconds() == 0.375
