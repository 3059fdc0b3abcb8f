"""Continuous batching in simulated time: steps of an engine, through the very admission that runs live.

In a step each running request computes a token, and prompts fill up what is left of the step's tokens: first
those that have begun, then those that are let in. So requests end one by one, and others come in their place.
Of the key-value cache nothing is known here: it is taken to be large enough.
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
    """What an engine does in a step, and how long it takes.

    fixed_s + row_s x rows + prompt_s x tokens + came_s x requests that come meanwhile.

    Attributes:
        batch_size: Most requests that run together.
        batch_tokens: Most tokens of a step.
        fixed_s: Seconds of any step.
        row_s: Seconds for each request that decodes.
        prompt_s: Seconds for each token of a prompt.
        came_s: Seconds for each request that comes: what reads it shares the engine's process.
        pace: By how much longer a step takes at a time, in seconds: a machine that others use, too.
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
        """When a step ends that begins at a time; the next requests come at those."""
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
        arrival_s: When it comes.
        prompt: Its tokens, at least 1.
        output: Tokens of its answer, at least 1.
        load_E: What the scheduler is told that it loads.
    """

    arrival_s: float
    prompt: int
    output: int
    load_E: Loads


class _Running:
    """A request in the batch: what is left of its prompt and of its answer."""

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
        When each request ends, float64 (N,), in seconds.
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
        # Step 1: what is in the step.
        decoding = [each for each in running.values() if not each.prompt_left]
        budget = model.batch_tokens - len(decoding)
        prompts: list[tuple[str, _Running, int]] = []
        for name, each in running.items():
            if each.prompt_left and budget:
                prompts.append((name, each, min(each.prompt_left, budget)))
                budget -= prompts[-1][2]
        room = model.batch_size - len(running)
        going, _ = admission.candidates(room, lambda: _load(running)) if room > 0 else ([], [])
        for name in going:
            if not budget:
                break
            running[name] = each = _Running(jobs[int(name)])
            prompts.append((name, each, min(each.prompt_left, budget)))
            budget -= prompts[-1][2]
            admission.admit([name])
        # Step 2: it takes its time.
        tokens = sum(part for *_, part in prompts)
        now = model.end_s(len(decoding), tokens, now, itertools.islice(arrival_s, came, None))
        # Step 3: a token for each that decodes, and for each whose prompt is through.
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
    """What runs and goes on: each request by the share of its answer that is left."""
    if not running:
        return None
    left = [each.output_left / each.job.output for each in running.values()]
    loads = [each.job.load_E for each in running.values()]
    return np.asarray(np.dot(left, loads), dtype=np.float64)
