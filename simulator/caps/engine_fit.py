"""The times of an engine's steps, fitted to a recording of a live queue."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from eaas.errors import ConfigError

__all__ = ["fit_engine", "recorded_steps"]

_LEAST = 20


def recorded_steps(events: Iterable[dict[str, Any]]) -> list[tuple[int, int, float]]:
    """Of each step in a recording: requests that decode, tokens of prompts, seconds."""
    return [(*event["step"], event["seconds"]) for event in events if "step" in event]


def fit_engine(steps: list[tuple[int, int, float]]) -> tuple[float, float, float]:
    """fixed_s, row_s and prompt_s of `EngineModel`: least squares; none comes out negative.

    All steps count, slow ones too: their sum is what requests wait for.

    Raises:
        ConfigError: There are too few steps.
    """
    if len(steps) < _LEAST:
        raise ConfigError(f"{len(steps)} recorded steps of the engine: a fit takes {_LEAST}")
    measured = np.array(steps, dtype=np.float64)
    terms = np.column_stack([np.ones(len(measured)), measured[:, :2]])
    used = [0, *(column for column in (1, 2) if terms[:, column].any())]
    while True:
        found, *_ = np.linalg.lstsq(terms[:, used], measured[:, 2])
        if not (found < 0).any():
            break
        del used[int(found.argmin())]
    fixed_s, row_s, prompt_s = np.bincount(used, found, minlength=3).tolist()
    return fixed_s, row_s, prompt_s
