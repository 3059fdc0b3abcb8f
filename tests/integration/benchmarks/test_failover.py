"""`python -m benchmarks.failover`, small: one server is killed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(240)]


def test_a_fault_and_the_same_work_without_it(checkpoint: Callable[..., Path]) -> None:
    words = "--servers 3 --faults 1 --streams 2 --max-tokens 80 --json"
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.failover", "--model", str(checkpoint()), *words.split()],
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        timeout=230,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    (row,) = document["faults"]
    assert row["kind"] == "kill"
    assert row["tokens"] == 160
    assert row["replacement_cpu_s"] > 0
    assert document["failed_requests"] == document["wrong_answers"] == 0
    assert document["lost"]["tokens_per_s_quiet"] > 0
