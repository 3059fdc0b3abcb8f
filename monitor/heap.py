"""Spares the monitor's long-lived objects from full garbage collections, which hold the loop."""

from __future__ import annotations

import gc
import sys
from typing import Any

__all__ = ["collect_young", "spare_long_lived"]

# The generation that objects leave for the oldest one.
_MIDDLE = 1


def spare_long_lived() -> None:
    """Let no later collection of this process look at an object again that has survived two. Called at start.

    The streams of ten thousand members are a million objects, which a full collection scans for half a
    second. Reference counts still free them. gRPC's streams leave cycles only at their start, which the first
    collections find.
    """
    # Later versions of Python collect old objects in small steps.
    if sys.version_info < (3, 14):
        gc.callbacks.append(_on_collection)


def collect_young() -> None:
    """Collect the objects that are not spared yet; at each tick, so that few of them gather.

    Python starts a collection by the number of new objects less the freed ones, old ones included. While
    members come and go, 100,000 new objects gather, and the next collection takes a tenth of a second.
    """
    gc.collect(_MIDDLE)


def _on_collection(phase: str, info: dict[str, Any]) -> None:
    if phase == "stop" and info["generation"] == _MIDDLE:
        gc.freeze()
