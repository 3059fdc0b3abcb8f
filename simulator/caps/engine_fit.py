"""The times of an engine's steps, fitted to a recording of a live queue."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from eaas.errors import ConfigError

__all__ = ["fit_engine", "recorded_pace", "recorded_steps"]

_LEAST = 20
_PACE_STEPS = 16


def recorded_steps(events: Iterable[dict[str, Any]]) -> list[tuple[int, int, float]]:
    """Of each step in a recording: requests that decode, tokens of prompts, seconds."""
    return [(*event["step"], event["seconds"]) for event in events if "step" in event]


def recorded_pace(
    events: Iterable[dict[str, Any]], fit: tuple[float, float, float], begin_s: float
) -> Callable[[float], float]:
    """How much longer than fitted the steps of a recording took, as a function of time.

    Args:
        events: With at least one step.
        fit: See `fit_engine`.
        begin_s: The time of the recording that is 0.
    """
    fixed_s, row_s, prompt_s = fit
    steps = [event for event in events if "step" in event]
    parts = [steps[n : n + _PACE_STEPS] for n in range(0, len(steps), _PACE_STEPS)]
    ends_s = np.array([part[-1]["at"] - begin_s for part in parts])
    pace = [
        sum(step["seconds"] for step in part)
        / sum(fixed_s + row_s * step["step"][0] + prompt_s * step["step"][1] for step in part)
        for part in parts
    ]
    return lambda now: pace[min(int(np.searchsorted(ends_s, now, "right")), len(pace) - 1)]


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
