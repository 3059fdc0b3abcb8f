"""The same arrivals on a live cluster and in simulated time, strategy by strategy."""

from __future__ import annotations

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
from simulator.caps.engine_fit import fit_engine, recorded_steps

__all__ = ["TOLERANCE", "Sizes", "validate"]

TOLERANCE = 0.1
# What the engine is measured with: closed-loop, so many users at a time, each with so many requests.
_ROUNDS = 4


@dataclass(frozen=True)
class Sizes:
    """What is measured.

    Attributes:
        requests: Of the compared load.
        prompt_tokens, output_tokens: Of each.
        batch_size, window_size: Of the scheduler.
        load: Requests a second, as a share of what the cluster was measured to do.
    """

    requests: int
    prompt_tokens: int
    output_tokens: int
    batch_size: int
    window_size: int
    load: float

    def workload(self, requests: int, concurrency: int) -> Workload:
        """Requests of that size."""
        return Workload(requests, concurrency, self.prompt_tokens, self.output_tokens)


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
) -> dict[str, Any]:
    """Measure a cluster under each strategy, and simulate it.

    The engine's times are fitted to a load that comes before the compared one, on the same cluster.

    Args:
        model: Checkpoint.
        config_file: Settings of the cluster; of its scheduler, strategy and sizes are set here.
        strategies: Names.
        sizes: Of the load.
        arrivals: From their number and a rate (requests/s) to the seconds at which requests come. The rate is
            that of the first strategy for all.
        servers, redundancy: Of the cluster.
        say: Progress, for people.

    Returns:
        JSON: for each strategy live and simulated P50 (ms) and throughput (requests/s), their errors, and the
        fitted engine; `within`: whether all errors are.

    Raises:
        EaasError: Something did not start, or a request failed.
    """
    rate: float | None = None
    rows = []
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
            with cluster:
                say(f"{name}: measuring the engine ...")
                alone, capacity = _calibrate(cluster.endpoint, sizes)
                before = _requests(sizes)
                rate = rate or sizes.load * capacity
                arrival_s = list(arrivals(sizes.requests, rate))
                say(f"{name}: {sizes.requests} requests at {rate:.1f}/s ...")
                live = run_load(cluster.endpoint, sizes.workload(sizes.requests, 1), arrival_s)
            rows.append(_compare(name, record, before, alone, arrival_s, live, sizes, settings))
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


def _users(sizes: Sizes) -> list[int]:
    """How many at a time: one, some, as many as run together, and more than that."""
    batch = sizes.batch_size
    return [1, max(1, batch // 2), batch, 2 * batch]


def _requests(sizes: Sizes) -> int:
    """Of the calibration."""
    return sum(_ROUNDS * users for users in [1, *_users(sizes)])


def _calibrate(endpoint: str, sizes: Sizes) -> tuple[float, float]:
    """The time of a request alone, and the requests a second of a full batch."""
    # A first one that does not count: memory is touched, connections are made.
    run_load(endpoint, sizes.workload(_ROUNDS, 1))
    loads: list[LoadResult] = [
        run_load(endpoint, sizes.workload(_ROUNDS * users, users)) for users in _users(sizes)
    ]
    full = loads[-1]
    return float(np.median(loads[0].e2e_s)), len(full.e2e_s) / full.seconds


def _compare(
    name: str,
    record: Path,
    before: int,
    alone_s: float,
    arrival_s: Sequence[float],
    live: LoadResult,
    sizes: Sizes,
    settings: ClusterConfig,
) -> dict[str, Any]:
    """Live and simulated figures of a strategy."""
    made_of, cost, events = read_recording(record)
    came = [place for place, event in enumerate(events) if "add" in event]
    begin = came[before]
    fixed_s, row_s, prompt_s = fit_engine(recorded_steps(events[:begin]))
    client = settings.attention_client
    engine = EngineModel(sizes.batch_size, client.max_batch_tokens, fixed_s, row_s, prompt_s)
    for event in events[:begin]:
        cost = event.get("price", cost)
    loads = [events[place]["load"] for place in came[before:]]
    jobs = [
        Job(at_s, sizes.prompt_tokens, sizes.output_tokens, load_E)
        for at_s, load_E in zip(arrival_s, loads, strict=True)
    ]

    def ends(jobs: Sequence[Job]) -> Any:
        return run_engine(jobs, Admission(made_of.queue(cost), sizes.batch_size, cost), engine)

    # What HTTP and tokens on their way add to the engine's time.
    (alone_end_s,) = ends([Job(0.0, sizes.prompt_tokens, sizes.output_tokens, loads[0])])
    around_s = max(0.0, alone_s - alone_end_s)
    end_s = ends(jobs) + around_s
    simulated = _figures(end_s - np.asarray(arrival_s), float(end_s.max()) - arrival_s[0])
    measured = _figures(np.asarray(live.e2e_s), live.seconds - arrival_s[0])
    choices = [event for event in events[begin:] if "take" in event]
    return {
        "strategy": name,
        "live": measured,
        "simulated": simulated,
        "error": {
            key: round(simulated[key] / measured[key] - 1, 4)
            for key in ("p50_ms", "throughput_per_s")
        },
        "choices": len(choices),
        "engine": {
            "fixed_ms": round(1e3 * fixed_s, 4),
            "row_ms": round(1e3 * row_s, 4),
            "prompt_token_ms": round(1e3 * prompt_s, 4),
            "around_ms": round(1e3 * around_s, 3),
        },
    }


def _figures(latency_s: Any, seconds: float) -> dict[str, float]:
    p50, p99 = (1e3 * np.percentile(latency_s, (50, 99))).tolist()
    return {
        "p50_ms": round(p50, 2),
        "p99_ms": round(p99, 2),
        "throughput_per_s": round(len(latency_s) / seconds, 3),
    }
