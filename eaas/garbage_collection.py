"""Switches Python's garbage collector off while a process imports torch or transformers."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_off"]


@contextmanager
def collector_off() -> Iterator[None]:
    """Disable garbage collection inside a `with` block; blocks can be nested.

    Imports create little garbage, and collections take a quarter of the import time of torch and
    transformers.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
