"""The loads that a live cluster's recorded queue went through, and the same ones in simulated time."""

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
from eaas.bench.load import LoadResult
from simulator.caps.continuous import EngineModel, Job, run_engine
from simulator.caps.engine_fit import (
    Pace,
    Times,
    fit_engine,
    probed_pace,
    recorded_pace,
    recorded_steps,
)

__all__ = ["COMPARED", "ROUND", "Sizes", "compare_recording", "reversed_gaps"]

COMPARED = ("p50_ms", "throughput_per_s")
# Which load of a round is the compared one, in even and odd rounds; the engine is fitted to the other.
ROUND = ((False, True), (True, False))
# The engine of a round is fitted to loads of so many rounds before and after it, too.
_NEAR = 1

Document = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        rounds: Each is a load that the engine is fitted to, and one that is compared.
        requests: Of a load.
        prompt_tokens, output_tokens: Of each.
        batch_size, window_size: Of the scheduler.
        load: Requests a second, as a share of what the cluster was measured to do.
    """

    rounds: int
    requests: int
    prompt_tokens: int
    output_tokens: int
    batch_size: int
    window_size: int
    load: float


def reversed_gaps(arrival_s: Sequence[float]) -> list[float]:
    """Arrivals from 0 on with the same times between them, the last one first."""
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
        record: Of the queue, whose last loads are the rounds' (`ROUND`).
        sizes: Of the loads.
        batch_tokens: Most tokens of the engine's step.
        arrival_s: Of the compared requests.
        before, alone: After so many requests, some that came one after the other with nobody else there.
        lives: One for each round.

    Raises:
        ConfigError: It is no recording, or has too few steps or probes.
    """
    settings, cost, events = read_recording(record)
    came = [place for place, event in enumerate(events) if "add" in event]
    firsts = came[len(came) - 2 * sizes.rounds * sizes.requests :: sizes.requests]
    bounds = [*firsts, len(events)]
    loads = [events[bounds[n] : bounds[n + 1]] for n in range(2 * sizes.rounds)]
    # The placement of the start is that of the end.
    prices = [event["price"] for event in events if "price" in event]
    pace = probed_pace(events)
    are_compared = [each for number in range(sizes.rounds) for each in ROUND[number % 2]]
    compared = [load for load, is_it in zip(loads, are_compared, strict=True) if is_it]
    fitted = [load for load, is_it in zip(loads, are_compared, strict=True) if not is_it]
    simulated = _Simulated(settings, prices[-1] if prices else cost, sizes, batch_tokens)
    steps = [recorded_steps(load) for load in fitted]
    beside_s = _beside_s(events, came[before:], alone)
    documents = []
    for number, (load, live) in enumerate(zip(compared, lives, strict=True)):
        near = steps[max(0, number - _NEAR) : number + _NEAR + 1]
        fit = fit_engine(list(itertools.chain.from_iterable(near)), pace)
        documents.append(_compare(simulated, load, arrival_s, beside_s, live, fit, pace))
    return documents


def _beside_s(events: Sequence[Document], came: Sequence[int], alone: LoadResult) -> float:
    """What HTTP and tokens on their way add to the engine's time: the median of requests that were alone.

    Each is compared with its own steps, since the machine may have another pace by the time of the rounds.
    """
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
        """At that pace of the recording's time, which is `begin_s` when the simulation begins."""
        sizes = self._sizes
        return EngineModel(
            sizes.batch_size, self._batch_tokens, *fit, pace=lambda now: pace(begin_s + now)
        )

    def latency_s(
        self, arrival_s: Sequence[float], loads: Sequence[Any], engine: EngineModel
    ) -> Any:
        """Of each request."""
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
    beside_s: float,
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
        latency_s = simulated.latency_s(arrival_s, predicted, engine) + beside_s
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
