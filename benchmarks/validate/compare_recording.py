"""Loads of a recorded live queue, compared with the same loads in simulated time."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from attention_client.scheduler.admission import Admission
from attention_client.scheduler.cost import CostModel
from attention_client.scheduler.recording import QueueSettings, read_recording
from benchmarks.validate.continuous import EngineModel, Job, run_engine
from benchmarks.validate.engine_fit import (
    Pace,
    Times,
    fit_engine,
    probed_pace,
    recorded_pace,
    recorded_steps,
)
from eaas_cli.bench.load import LoadResult

__all__ = ["COMPARED", "ROUND", "Sizes", "compare_recording", "reversed_gaps"]

COMPARED = ("p50_ms", "throughput_per_s")
# Whether each load of an even and an odd round is compared; the engine is fitted to the other load.
ROUND = ((False, True), (True, False))
# Neighbouring rounds on each side whose loads are also fitted.
_NEAR = 1

Document = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """Sizes of a run.

    Attributes:
        rounds: Rounds with one fitted and one compared load each.
        requests: Requests per load.
        prompt_tokens, output_tokens: Tokens of each request.
        batch_size, window_size: Settings of the scheduler.
        load: Arrival rate over the measured capacity.
    """

    rounds: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    batch_size: int
    window_size: int
    load: float


def reversed_gaps(arrival_s: Sequence[float]) -> list[float]:
    """Arrivals from 0 with the gaps in reversed order."""
    return [arrival_s[-1] - at_s for at_s in reversed(arrival_s)]


def compare_recording(
    record: Path,
    sizes: Sizes,
    batch_tokens: int,
    arrival_s: Sequence[float],
    before: int,
    alone: LoadResult,
    lives: Sequence[LoadResult],
) -> list[Document]:
    """Live and simulated figures of each round.

    Args:
        record: Recording of the queue; its last loads are those of the rounds (`ROUND`).
        sizes: Sizes of the loads.
        batch_tokens: Largest step of the engine, in tokens.
        arrival_s: Arrivals of the compared requests.
        before, alone: Results of single requests, which came after `before` others.
        lives: One per round.

    Raises:
        ConfigError: The file is not a recording, or has too few steps or probes.
    """
    settings, cost, events = read_recording(record)
    came = [place for place, event in enumerate(events) if "add" in event]
    firsts = came[len(came) - 2 * sizes.rounds * sizes.requests :: sizes.requests]
    bounds = [*firsts, len(events)]
    loads = [events[bounds[n] : bounds[n + 1]] for n in range(2 * sizes.rounds)]
    # The placement does not change during the run.
    prices = [event["price"] for event in events if "price" in event]
    pace = probed_pace(events)
    are_compared = [each for number in range(sizes.rounds) for each in ROUND[number % 2]]
    compared = [load for load, is_it in zip(loads, are_compared, strict=True) if is_it]
    fitted = [load for load, is_it in zip(loads, are_compared, strict=True) if not is_it]
    simulated = _Simulated(settings, prices[-1] if prices else cost, sizes, batch_tokens)
    steps = [recorded_steps(load) for load in fitted]
    overhead_s = _overhead_s(events, came[before:], alone)
    documents = []
    for number, (load, live) in enumerate(zip(compared, lives, strict=True)):
        near = steps[max(0, number - _NEAR) : number + _NEAR + 1]
        fit = fit_engine(list(itertools.chain.from_iterable(near)), pace)
        documents.append(_compare(simulated, load, arrival_s, overhead_s, live, fit, pace))
    return documents


def _overhead_s(events: Sequence[Document], came: Sequence[int], alone: LoadResult) -> float:
    """Median overhead of HTTP over the engine's time, from single requests and their own steps."""
    own_s = [
        sum(event["seconds"] for event in events[begin:end] if "step" in event)
        for begin, end in itertools.pairwise(came[: len(alone.e2e_s) + 1])
    ]
    return max(0.0, float(np.median(np.subtract(alone.e2e_s, own_s))))


class _Simulated:
    """The engine of a recording in simulated time."""

    def __init__(
        self, settings: QueueSettings, cost: CostModel, sizes: Sizes, batch_tokens: int
    ) -> None:
        self._settings, self._cost = settings, cost
        self._sizes, self._batch_tokens = sizes, batch_tokens

    def engine(self, fit: Times, pace: Pace, begin_s: float) -> EngineModel:
        """An engine at the recorded pace; the simulation begins at `begin_s` of the recording."""
        sizes = self._sizes
        return EngineModel(
            sizes.batch_size, self._batch_tokens, *fit, pace=lambda now: pace(begin_s + now)
        )

    def latency_s(
        self, arrival_s: Sequence[float], loads: Sequence[Any], engine: EngineModel
    ) -> Any:
        """Latency of each request."""
        sizes = self._sizes
        jobs = [
            Job(at_s, sizes.prompt_tokens, sizes.output_tokens, load_E)
            for at_s, load_E in zip(arrival_s, loads, strict=True)
        ]
        queue = self._settings.queue(self._cost)
        end_s = run_engine(jobs, Admission(queue, sizes.batch_size, self._cost), engine)
        return end_s - np.asarray(arrival_s)


def _compare(
    simulated: _Simulated,
    compared: Sequence[Document],
    arrival_s: Sequence[float],
    overhead_s: float,
    live: LoadResult,
    fit: Times,
    pace: Pace,
) -> Document:
    predicted = [event["load"] for event in compared if "add" in event]
    begin_s = compared[0]["at"] - arrival_s[0]
    steps = recorded_steps(compared)
    own = fit_engine(steps)
    engines = {
        "simulated": simulated.engine(fit, pace, begin_s),
        "simulated_own_steps": simulated.engine(own, recorded_pace(steps, own), begin_s),
    }
    measured = _figures(np.asarray(live.e2e_s), live.seconds)
    itl_ms = 1e3 * np.percentile(live.itl_s, (50, 99))
    document: Document = {
        "live": measured | {"itl_p50_ms": round(itl_ms[0], 2), "itl_p99_ms": round(itl_ms[1], 2)}
    }
    for kind, engine in engines.items():
        latency_s = simulated.latency_s(arrival_s, predicted, engine) + overhead_s
        figures = _figures(latency_s, float((latency_s + arrival_s).max()))
        document[kind] = figures

    names = ("fixed_ms", "row_ms", "prompt_token_ms", "request_ms")
    usual = float(np.median([pace(step[4]) for step in steps]))
    document["engine"] = {
        name: round(1e3 * usual * time_s, 4) for name, time_s in zip(names, fit, strict=True)
    }
    return document | {"choices": sum("take" in event for event in compared)}


def _figures(latency_s: Any, seconds: float) -> dict[str, float]:
    p50, p99 = (1e3 * np.percentile(latency_s, (50, 99))).tolist()
    return {
        "p50_ms": round(p50, 2),
        "p99_ms": round(p99, 2),
        "throughput_per_s": round(len(latency_s) / seconds, 3),
    }
