"""The example runs and shows its result."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import script


def test_compare_policies(capsys: pytest.CaptureFixture[str]) -> None:
    comparison = script(Path(__file__).parents[3] / "examples" / "compare_policies.py").main()
    scores = {run.policy: comparison.score(run) for run in comparison.replays}
    assert max(scores, key=scores.__getitem__) == "fractional+split"
    shown = capsys.readouterr().out
    assert "planned PAR 1.0000" in shown
    assert len(shown.splitlines()) == 4
