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
from simulator.caps.engine_fit import fit_engine, recorded_pace, recorded_steps

__all__ = ["COMPARED", "FitLoad", "Sizes", "compare_recording"]

COMPARED = ("p50_ms", "throughput_per_s")

# Requests of each user of a load that the engine is fitted to.
_EACH = 3

Document = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        rounds: Each is a load that is compared, between two that fit the engine; medians count.
        requests: Of the compared load.
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

    @property
    def fit_loads(self) -> list[tuple[int, int]]:
        """Requests and users of what the engine is fitted to: one at a time, some, a full batch, more."""
        users = (1, max(1, self.batch_size // 2), self.batch_size, 2 * self.batch_size)
        return [(_EACH * count, count) for count in users]

    @property
    def fitting(self) -> int:
        """Requests of all that."""
        return sum(requests for requests, _ in self.fit_loads)


@dataclass(frozen=True)
class FitLoad:
    """What users saw of a load that the engine is fitted to.

    Attributes:
        alone_s: Time of a request with nobody else there, the median.
        capacity_per_s: Requests a second of a full batch.
    """

    alone_s: float
    capacity_per_s: float


def compare_recording(
    record: Path,
    sizes: Sizes,
    batch_tokens: int,
    arrival_s: Sequence[float],
    fits: Sequence[FitLoad],
    lives: Sequence[LoadResult],
) -> list[Document]:
    """Live and simulated figures of each round.

    Args:
        record: Of the queue, whose last loads are, for each round, one to fit, the compared one, one to fit.
        sizes: Of the loads.
        batch_tokens: Most tokens of the engine's step.
        arrival_s: Of the compared requests.
        fits: Two for each round.
        lives: One for each round.

    Raises:
        ConfigError: It is no recording, or has too few steps.
    """
    settings, cost, events = read_recording(record)
    came = [place for place, event in enumerate(events) if "add" in event]
    counts = [sizes.fitting, sizes.requests, sizes.fitting] * sizes.rounds
    ends = list(itertools.accumulate(counts, initial=len(came) - sum(counts)))
    bounds = [came[first] for first in ends[:-1]] + [len(events)]
    loads = [events[begin:end] for begin, end in itertools.pairwise(bounds)]
    # The placement of the start is that of the end.
    prices = [event["price"] for event in events if "price" in event]
    simulated = _Simulated(settings, prices[-1] if prices else cost, sizes, batch_tokens)
    return [
        _compare(
            simulated,
            loads[3 * number : 3 * number + 3],
            arrival_s,
            float(np.mean([fit.alone_s for fit in fits[2 * number : 2 * number + 2]])),
            live,
        )
        for number, live in enumerate(lives)
    ]


class _Simulated:
    """The engine of a recording in simulated time."""

    def __init__(
        self, settings: QueueSettings, cost: CostModel, sizes: Sizes, batch_tokens: int
    ) -> None:
        self._settings, self._cost = settings, cost
        self._sizes, self._batch_tokens = sizes, batch_tokens

    def engine(self, fit: tuple[float, float, float], **pace: Any) -> EngineModel:
        return EngineModel(self._sizes.batch_size, self._batch_tokens, *fit, **pace)

    def latency_s(
        self, arrival_s: Sequence[float], loads: Sequence[Any], engine: EngineModel
    ) -> Any:
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
    loads: Sequence[Sequence[Document]],
    arrival_s: Sequence[float],
    alone_s: float,
    live: LoadResult,
) -> Document:
    before, compared, after = loads
    predicted = [event["load"] for event in compared if "add" in event]
    own = fit_engine(recorded_steps(compared))
    pace = recorded_pace(compared, own, compared[0]["at"] - arrival_s[0])
    engines = {
        "error": simulated.engine(fit_engine(recorded_steps([*before, *after]))),
        "error_own_steps": simulated.engine(own, pace=pace),
    }
    measured = _figures(np.asarray(live.e2e_s), live.seconds)
    itl_ms = 1e3 * np.percentile(live.itl_s, (50, 99))
    document: Document = {
        "live": measured | {"itl_p50_ms": round(itl_ms[0], 2), "itl_p99_ms": round(itl_ms[1], 2)}
    }
    for kind, engine in engines.items():
        # What HTTP and tokens on their way add to the engine's time.
        (alone_engine_s,) = simulated.latency_s([0.0], predicted[:1], engine)
        latency_s = simulated.latency_s(arrival_s, predicted, engine)
        latency_s += max(0.0, alone_s - alone_engine_s)
        figures = _figures(latency_s, float((latency_s + arrival_s).max()))
        if kind == "error":
            document["simulated"] = figures
            times = engine.fixed_s, engine.row_s, engine.prompt_s
            names = ("fixed_ms", "row_ms", "prompt_token_ms")
            document["engine"] = {
                name: round(1e3 * time_s, 4) for name, time_s in zip(names, times, strict=True)
            }
        document[kind] = {key: round(figures[key] / measured[key] - 1, 4) for key in COMPARED}
    return document | {"choices": sum("take" in event for event in compared)}


def _figures(latency_s: Any, seconds: float) -> dict[str, float]:
    p50, p99 = (1e3 * np.percentile(latency_s, (50, 99))).tolist()
    return {
        "p50_ms": round(p50, 2),
        "p99_ms": round(p99, 2),
        "throughput_per_s": round(len(latency_s) / seconds, 3),
    }
