"""The times of an engine's steps, fitted to a recording of a live queue, and the pace of its machine."""

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

# Of a step: requests that decode, tokens of prompts, requests that came meanwhile; seconds, and its end.
Step = tuple[int, int, int, float, float]
Times = tuple[float, float, float, float]
Pace = Callable[[float], float]

_LEAST = 20
_PACE_STEPS = 16
_PROBES = 5
# An engine that does not idle takes requests in at once when a step has ended.
_AT_ONCE_S = 0.005


def constant_pace(_now: float) -> float:
    """A machine of one's own."""
    return 1.0


def recorded_steps(events: Iterable[dict[str, Any]]) -> list[Step]:
    """The steps in a recording."""
    steps: list[Step] = []
    last_s = -math.inf  # of the end of a step, or of those that it had held up
    for event in events:
        if "step" in event:
            steps.append((*event["step"], 0, event["seconds"], event["at"]))
            last_s = event["at"]
        elif "add" in event and event["at"] - last_s < _AT_ONCE_S:
            # The engine sees it when the step ends in which it came.
            rows, tokens, came, seconds, ended_s = steps[-1]
            steps[-1] = (rows, tokens, came + 1, seconds, ended_s)
            last_s = event["at"]
    return steps


def probed_pace(events: Iterable[dict[str, Any]]) -> Pace:
    """How long the fixed computation took, as a function of the recording's time.

    The median of the nearest few: a single one may have been interrupted.

    Raises:
        ConfigError: There are too few.
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
    """How much longer than fitted the steps took, as a function of the recording's time.

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
    """fixed_s, row_s, prompt_s and came_s of `EngineModel`: least squares; none comes out negative.

    All steps count, slow ones too: their sum is what requests wait for.

    Args:
        steps: Of a recording.
        pace: Of the machine at each time of that: what is fitted is a step at pace 1.

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
