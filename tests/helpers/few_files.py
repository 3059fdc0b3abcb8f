"""Temporary limits on open files."""

from __future__ import annotations

import itertools
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

__all__ = ["few_files", "no_files"]


@contextmanager
def few_files(free: int) -> Iterator[int]:
    """Let this process open only so many new files; yields the limit."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = {int(name) for name in os.listdir("/proc/self/fd")}
    numbers = itertools.filterfalse(taken.__contains__, itertools.count())
    limit = next(itertools.islice(numbers, free, None))
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@contextmanager
def no_files() -> Iterator[list[int]]:
    """Use up all file descriptors of this process; yields them."""
    held: list[int] = []
    try:
        with suppress(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield held
    finally:
        for fd in held:
            os.close(fd)
