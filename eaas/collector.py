"""Python's garbage collector, kept from heavy imports."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["collector_off"]


@contextmanager
def collector_off() -> Iterator[None]:
    """No garbage collection inside the block. A block inside another leaves all to the outer one.

    For imports: hardly anything that they make is garbage, and looking for it takes a fourth of the time of
    torch and transformers.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
