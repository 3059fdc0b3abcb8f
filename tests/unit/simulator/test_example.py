"""The example runs and shows its result."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest


def test_compare_policies(capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(__file__).parents[3] / "examples" / "compare_policies.py"
    spec = importlib.util.spec_from_file_location("compare_policies", path)
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    comparison = example.main()
    scores = {run.policy: comparison.score(run) for run in comparison.replays}
    assert max(scores, key=scores.__getitem__) == "fractional+split"
    shown = capsys.readouterr().out
    assert "planned PAR 1.0000" in shown
    assert len(shown.splitlines()) == 4
