"""Programs that tests run: to their end, or beside the test."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

__all__ = ["output_of", "running"]


def output_of(
    *command: object,
    timeout_s: float = 100.0,
    env: Mapping[str, str] | None = None,
    cwd: Any = None,
) -> str:
    """Run a program to its end and return its output. A failure fails the test, with all that it said."""
    words = [str(word) for word in command]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=timeout_s, env=env, cwd=cwd
    )
    assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@contextmanager
def running(module: str, *arguments: str, ready: str) -> Iterator[subprocess.Popen[str]]:
    """Run `python -m module` until the context ends; enters once it has printed the line `ready`.

    An attacker must not share the test's interpreter. A process that ends by itself with an error fails the
    test.
    """
    command = [sys.executable, "-m", module, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"{ready}\n"
            yield process
            assert not process.poll(), f"{module} ended"
        finally:
            process.kill()
