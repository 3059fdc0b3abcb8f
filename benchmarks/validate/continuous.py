"""Continuous batching in simulated time: an engine's steps, with the live system's admission.

In a step each running request computes a token, and prompts fill the rest of the step's tokens: first those
that have begun, then newly admitted ones. So requests end one by one, and others take their place. The
key-value cache is assumed to be large enough.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from attention_client.scheduler.admission import Admission
from attention_client.scheduler.cost import Loads

__all__ = ["EngineModel", "Job", "run_engine"]


@dataclass(frozen=True)
class EngineModel:
    """Limits and duration of an engine's step.

    Duration: fixed_s + row_s x rows + prompt_s x tokens + came_s x requests that arrive meanwhile.

    Attributes:
        batch_size: Most requests that run together.
        batch_tokens: Most tokens of a step.
        fixed_s: Seconds of any step.
        row_s: Seconds per decoding request.
        prompt_s: Seconds per token of a prompt.
        came_s: Seconds per arriving request, which is read in the engine's process.
        pace: Slow-down factor as a function of time, on a shared machine.
    """

    batch_size: int
    batch_tokens: int
    fixed_s: float
    row_s: float
    prompt_s: float
    came_s: float = 0.0
    pace: Callable[[float], float] = lambda now: 1.0

    def end_s(
        self, rows: int, prompt_tokens: int, now: float = 0.0, next_s: Iterable[float] = ()
    ) -> float:
        """End of a step that begins at `now`; `next_s` are the times of the next arrivals."""
        pace = self.pace(now)
        end_s = now + pace * (self.fixed_s + self.row_s * rows + self.prompt_s * prompt_tokens)
        for came_s in next_s:
            if came_s > end_s:
                break
            end_s += pace * self.came_s
        return end_s


@dataclass(frozen=True)
class Job:
    """A request.

    Attributes:
        arrival_s: Its arrival.
        prompt: Tokens of the prompt, at least 1.
        output: Tokens of the answer, at least 1.
        load_E: Its load as given to the scheduler.
    """

    arrival_s: float
    prompt: int
    output: int
    load_E: Loads


class _Running:
    """A request in the batch, with the rest of its prompt and answer."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.prompt_left = job.prompt
        self.output_left = job.output


def run_engine(
    jobs: Sequence[Job], admission: Admission, model: EngineModel
) -> npt.NDArray[np.float64]:
    """Run requests to their end.

    Args:
        jobs: By arrival (N).
        admission: Empty and new.
        model: The engine.

    Returns:
        End of each request, float64 (N,), in seconds.
    """
    end_s = np.zeros(len(jobs))
    arrival_s = [job.arrival_s for job in jobs]
    running: dict[str, _Running] = {}
    now, came, ended = 0.0, 0, 0
    while ended < len(jobs):
        if not running and not len(admission):
            now = max(now, jobs[came].arrival_s)
        while came < len(jobs) and jobs[came].arrival_s <= now:
            admission.arrive(str(came), jobs[came].load_E)
            came += 1
        # Step 1: fill the step.
        decoding = [each for each in running.values() if not each.prompt_left]
        budget = model.batch_tokens - len(decoding)
        prompts: list[tuple[str, _Running, int]] = []
        for name, each in running.items():
            if each.prompt_left and budget:
                prompts.append((name, each, min(each.prompt_left, budget)))
                budget -= prompts[-1][2]
        free = model.batch_size - len(running)
        going, _ = admission.candidates(free, lambda: _load(running)) if free > 0 else ([], [])
        for name in going:
            if not budget:
                break
            running[name] = each = _Running(jobs[int(name)])
            prompts.append((name, each, min(each.prompt_left, budget)))
            budget -= prompts[-1][2]
            admission.admit([name])
        # Step 2: advance the time.
        tokens = sum(part for *_, part in prompts)
        now = model.end_s(len(decoding), tokens, now, itertools.islice(arrival_s, came, None))
        # Step 3: one token for each decoding request and each whose prompt is done.
        for each in decoding:
            each.output_left -= 1
        for name, each, part in prompts:
            each.prompt_left -= part
            if not each.prompt_left:
                each.output_left -= 1
                admission.saw(name, each.job.load_E)
        for name in [name for name, each in running.items() if not each.output_left]:
            end_s[int(name)] = now
            del running[name]
            admission.leave(name)
            ended += 1
    return end_s


def _load(running: dict[str, _Running]) -> Loads | None:
    """Load of the running requests, weighted by the rest of their answers."""
    if not running:
        return None
    left = [each.output_left / each.job.output for each in running.values()]
    loads = [each.job.load_E for each in running.values()]
    return np.asarray(np.dot(left, loads), dtype=np.float64)
