"""Helpers of this folder as processes of their own: attackers that must not share the test's interpreter."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["running"]


@contextmanager
def running(module: str, *arguments: str, ready: str) -> Iterator[subprocess.Popen[str]]:
    """Run `python -m module` until the context ends; enters once it has printed the line `ready`.

    A process that ends by itself with an error fails the test.
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
