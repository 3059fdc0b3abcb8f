"""`python -m benchmarks.experts`, small."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_a_live_server_reads_no_faster_than_its_machine() -> None:
    words = "--shape 1024,512,16,2 --tokens 1,4 --rounds 1 --json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.experts", *words.split()],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["tokens"] for row in rows] == [1, 4]
    for row in rows:
        assert row["service_us"] > 0
        assert 0 < row["round_trip"] <= row["live"] < 1.5
        assert row["least"] <= row["live"] <= row["most"]
