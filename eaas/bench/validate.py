"""The same arrivals on a live cluster and in simulated time, strategy by strategy."""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from attention_client.scheduler.admission import Admission
from attention_client.scheduler.recording import read_recording
from eaas.bench.load import LoadResult, Workload, run_load
from eaas.config import ClusterConfig, load_config
from eaas.local import LocalCluster
from simulator.caps.continuous import EngineModel, Job, run_engine
from simulator.caps.engine_fit import fit_engine, recorded_pace, recorded_steps

__all__ = ["TOLERANCE", "Sizes", "validate"]

TOLERANCE = 0.1
# What the engine is measured with: closed-loop, so many users at a time, each with so many requests.
_EACH = 4
_COMPARED = ("p50_ms", "throughput_per_s")

Document = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        rounds: Each is a load that fits the engine, and one that is compared; medians count.
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

    def workload(self, requests: int, concurrency: int) -> Workload:
        """Requests of that size."""
        return Workload(requests, concurrency, self.prompt_tokens, self.output_tokens)

    @property
    def users(self) -> list[int]:
        """How many at a time: one, some, as many as run together, and more than that."""
        return [1, max(1, self.batch_size // 2), self.batch_size, 2 * self.batch_size]

    @property
    def fitting(self) -> int:
        """Requests of a load that the engine is fitted to."""
        return sum(_EACH * users for users in self.users)


def validate(
    model: Path,
    config_file: Path | None,
    strategies: Sequence[str],
    sizes: Sizes,
    arrivals: Callable[[int, float], Sequence[float]],
    *,
    servers: int,
    redundancy: int,
    say: Callable[[str], None],
) -> Document:
    """Measure a cluster under each strategy, and simulate it.

    The engine's times are fitted to loads that come before and after each compared one, on the same cluster.

    Args:
        model: Checkpoint.
        config_file: Settings of the cluster; of its scheduler, strategy and sizes are set here.
        strategies: Names.
        sizes: Of the loads.
        arrivals: From their number and a rate (requests/s) to the seconds at which requests come. The rate is
            that of the first strategy for all.
        servers, redundancy: Of the cluster.
        say: Progress, for people.

    Returns:
        JSON: for each strategy the live and simulated P50 (ms) and throughput (requests/s) of each round, the
        median of their errors, and that of a simulation with the compared load's own steps and the pace that
        they had at each time: what is left if the machine's speed is known. `within`: whether all errors of
        the first kind are.

    Raises:
        EaasError: Something did not start, or a request failed.
    """
    rate: float | None = None
    rows: list[Document] = []
    for name in strategies:
        say(f"{name}: starting a cluster ...")
        with tempfile.TemporaryDirectory() as directory:
            record = Path(directory) / "queue.jsonl"
            settings = _settings(config_file, name, sizes, record)
            path = Path(directory) / "cluster.yaml"
            path.write_text(yaml.safe_dump(settings.model_dump()))
            cluster = LocalCluster(
                model, servers=servers, redundancy=redundancy, config=settings, config_file=path
            )
            lives: list[LoadResult] = []
            with cluster:
                # A first load that does not count: memory is touched, connections are made.
                _fit_load(cluster.endpoint, sizes)
                alone_s, capacity = _fit_load(cluster.endpoint, sizes)
                rate = rate or sizes.load * capacity
                arrival_s = list(arrivals(sizes.requests, rate))
                for number in range(sizes.rounds):
                    say(f"{name}: round {number + 1} of {sizes.rounds}, {rate:.1f} requests/s ...")
                    workload = sizes.workload(sizes.requests, 1)
                    lives.append(run_load(cluster.endpoint, workload, arrival_s))
                    _fit_load(cluster.endpoint, sizes)
            recorded = _Recorded(record, sizes, settings.attention_client.max_batch_tokens)
            rounds = [
                recorded.compare(number, live, arrival_s, alone_s)
                for number, live in enumerate(lives)
            ]
            rows.append(
                {"strategy": name, "error": _median(rounds, "error")}
                | {"error_own_steps": _median(rounds, "error_own_steps"), "rounds": rounds}
            )
    errors = [abs(error) for row in rows for error in row["error"].values()]
    return {
        "model": model.name,
        "servers": servers,
        "redundancy": redundancy,
        "sizes": vars(sizes),
        "rate_per_s": round(rate or 0.0, 2),
        "strategies": rows,
        "tolerance": TOLERANCE,
        "within": max(errors) <= TOLERANCE,
    }


def _settings(config_file: Path | None, strategy: str, sizes: Sizes, record: Path) -> ClusterConfig:
    scheduler = {
        "strategy": strategy,
        "batch_size": sizes.batch_size,
        "window_size": sizes.window_size,
        "record": str(record),
    }
    return load_config(config_file, attention_client={"port": 0, "scheduler": scheduler})


def _fit_load(endpoint: str, sizes: Sizes) -> tuple[float, float]:
    """The time of a request alone, and the requests a second of a full batch."""
    loads = [run_load(endpoint, sizes.workload(_EACH * n, n)) for n in sizes.users]
    full = loads[-1]
    return float(np.median(loads[0].e2e_s)), len(full.e2e_s) / full.seconds


class _Recorded:
    """The recording of a cluster's queue, cut into its loads: two to fit, then a compared one and one to fit
    for each round.
    """

    def __init__(self, record: Path, sizes: Sizes, batch_tokens: int) -> None:
        self._made_of, cost, events = read_recording(record)
        self._sizes, self._batch_tokens = sizes, batch_tokens
        came = [place for place, event in enumerate(events) if "add" in event]
        counts = [sizes.fitting, sizes.fitting, *[sizes.requests, sizes.fitting] * sizes.rounds]
        begins = [came[first] for first in itertools.accumulate(counts[:-1], initial=0)]
        bounds = zip(begins, [*begins[1:], len(events)], strict=True)
        self._loads = [events[begin:end] for begin, end in bounds]
        # The placement of the start is that of the end.
        prices = [event["price"] for event in events if "price" in event]
        self._cost = prices[-1] if prices else cost

    def compare(
        self, number: int, live: LoadResult, arrival_s: Sequence[float], alone_s: float
    ) -> Document:
        """Live and simulated figures of a round."""
        before, compared, after = self._loads[2 * number + 1 : 2 * number + 4]
        jobs = self._jobs(arrival_s, [event["load"] for event in compared if "add" in event])
        own = fit_engine(recorded_steps(compared))
        begin_s = compared[0]["at"] - arrival_s[0]
        fits = {
            "error": (fit_engine(recorded_steps([*before, *after])), lambda now: 1.0),
            "error_own_steps": (own, recorded_pace(compared, own, begin_s)),
        }
        measured = _figures(np.asarray(live.e2e_s), live.seconds)
        document: Document = {"live": measured}
        for kind, (fit, pace) in fits.items():
            engine = EngineModel(self._sizes.batch_size, self._batch_tokens, *fit, pace)
            # What HTTP and tokens on their way add to the engine's time.
            (alone_end_s,) = self._run(self._jobs([0.0], [jobs[0].load_E]), engine)
            end_s = self._run(jobs, engine) + max(0.0, alone_s - alone_end_s)
            simulated = _figures(end_s - np.asarray(arrival_s), float(end_s.max()))
            if kind == "error":
                document["simulated"] = simulated
                times = engine.fixed_s, engine.row_s, engine.prompt_s
                names = ("fixed_ms", "row_ms", "prompt_token_ms")
                document["engine"] = {
                    name: round(1e3 * time_s, 4) for name, time_s in zip(names, times, strict=True)
                }
            document[kind] = {
                key: round(simulated[key] / measured[key] - 1, 4) for key in _COMPARED
            }
        return document | {"choices": sum("take" in event for event in compared)}

    def _jobs(self, arrival_s: Sequence[float], loads: Sequence[Any]) -> list[Job]:
        sizes = self._sizes
        return [
            Job(at_s, sizes.prompt_tokens, sizes.output_tokens, load_E)
            for at_s, load_E in zip(arrival_s, loads, strict=True)
        ]

    def _run(self, jobs: Sequence[Job], engine: EngineModel) -> Any:
        queue = self._made_of.queue(self._cost)
        return run_engine(jobs, Admission(queue, self._sizes.batch_size, self._cost), engine)


def _median(rounds: Sequence[Document], kind: str) -> dict[str, float]:
    return {
        key: round(statistics.median(each[kind][key] for each in rounds), 4) for key in _COMPARED
    }


def _figures(latency_s: Any, seconds: float) -> dict[str, float]:
    p50, p99 = (1e3 * np.percentile(latency_s, (50, 99))).tolist()
    return {
        "p50_ms": round(p50, 2),
        "p99_ms": round(p99, 2),
        "throughput_per_s": round(len(latency_s) / seconds, 3),
    }
