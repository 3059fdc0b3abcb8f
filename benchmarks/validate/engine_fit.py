"""Fits an engine's step times, and the pace of its machine, to a recording of a live queue."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from eaas.errors import ConfigError

__all__ = [
    "Pace",
    "Step",
    "Times",
    "constant_pace",
    "fit_engine",
    "probed_pace",
    "recorded_pace",
    "recorded_steps",
]

# A step: decoding requests, prompt tokens, requests that arrived meanwhile, its seconds, its end.
Step = tuple[int, int, int, float, float]
Times = tuple[float, float, float, float]
Pace = Callable[[float], float]

_LEAST = 20
_PACE_STEPS = 16
_PROBES = 5
# A busy engine admits requests right after a step.
_AT_ONCE_S = 0.005


def constant_pace(_now: float) -> float:
    """The pace of an unshared machine."""
    return 1.0


def recorded_steps(events: Iterable[dict[str, Any]]) -> list[Step]:
    """The steps in a recording."""
    steps: list[Step] = []
    last_s = -math.inf  # end of the last step, or the last request read right after it
    for event in events:
        if "step" in event:
            steps.append((*event["step"], 0, event["seconds"], event["at"]))
            last_s = event["at"]
        elif "add" in event and event["at"] - last_s < _AT_ONCE_S:
            # The engine sees a request at the end of the step in which it arrived.
            rows, tokens, came, seconds, ended_s = steps[-1]
            steps[-1] = (rows, tokens, came + 1, seconds, ended_s)
            last_s = event["at"]
    return steps


def probed_pace(events: Iterable[dict[str, Any]]) -> Pace:
    """Duration of the fixed probe computation, as a function of the recording's time.

    Medians of neighbouring probes: a single one may have been interrupted.

    Raises:
        ConfigError: There are too few probes.
    """
    probes = [(event["at"], event["probe"]) for event in events if "probe" in event]
    if len(probes) < _PROBES:
        raise ConfigError(
            f"{len(probes)} recorded probes of the machine's pace: it takes {_PROBES}"
        )
    at_N, seconds_N = np.array(probes).T
    medians_N = np.median(np.lib.stride_tricks.sliding_window_view(seconds_N, _PROBES), axis=1)
    middle_N = at_N[_PROBES // 2 : _PROBES // 2 + len(medians_N)]
    return lambda now: float(np.interp(now, middle_N, medians_N))


def recorded_pace(steps: Sequence[Step], fit: Times) -> Pace:
    """Measured over fitted step time, as a function of the recording's time.

    Args:
        steps: At least one.
        fit: See `fit_engine`.
    """
    parts = [steps[n : n + _PACE_STEPS] for n in range(0, len(steps), _PACE_STEPS)]
    ends_s = np.array([part[-1][4] for part in parts])
    pace = [
        sum(step[3] for step in part) / sum(float(np.dot(fit, (1, *step[:3]))) for step in part)
        for part in parts
    ]
    return lambda now: pace[min(int(np.searchsorted(ends_s, now, "right")), len(pace) - 1)]


def fit_engine(steps: Sequence[Step], pace: Pace = constant_pace) -> Times:
    """fixed_s, row_s, prompt_s and came_s of `EngineModel`, by non-negative least squares.

    Slow steps count, too: requests wait for the sum of all.

    Args:
        steps: Of a recording.
        pace: The machine's pace over time; the fit is for pace 1.

    Raises:
        ConfigError: There are too few steps.
    """
    if len(steps) < _LEAST:
        raise ConfigError(f"{len(steps)} recorded steps of the engine: a fit takes {_LEAST}")
    measured = np.array(steps, dtype=np.float64)
    pace_N = np.array([pace(ended_s - seconds / 2) for *_, seconds, ended_s in steps])
    terms = np.column_stack([np.ones(len(measured)), measured[:, :3]])
    used = [0, *(column for column in (1, 2, 3) if terms[:, column].any())]
    while True:
        found, *_ = np.linalg.lstsq(terms[:, used], measured[:, 3] / pace_N)
        if not (found < 0).any():
            break
        del used[int(found.argmin())]
    fixed_s, row_s, prompt_s, came_s = np.bincount(used, found, minlength=4).tolist()
    return fixed_s, row_s, prompt_s, came_s
