"""The Makefile's variables."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def make(*words: str) -> subprocess.CompletedProcess[str]:
    # Without what `make test` passes on to other makes.
    own = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--dry-run", "up", *words]
    return subprocess.run(command, cwd=ROOT, env=own, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("given", "remedy"),
    [
        ("SERVER=4", "no variable SERVER; did you mean SERVERS?"),
        ("port=8080", "no variable port; did you mean PORT?"),
        ("XYZZY=1", "no variable XYZZY; a program's own stands before make"),
    ],
)
def test_a_variable_that_nothing_reads_is_refused(given: str, remedy: str) -> None:
    done = make("REDUNDANCY=1", given)
    assert done.returncode == 2
    assert remedy in done.stderr
    assert done.stdout == ""


def test_variables_that_are_read_pass() -> None:
    done = make("SERVERS=4", "PORT=8080", "MODEL=a b")
    assert done.returncode == 0, done.stderr
    assert "--model 'a b' --servers 4" in done.stdout
