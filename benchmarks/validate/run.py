"""The same arrivals on live clusters and in simulated time, for each strategy."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from benchmarks.validate.compare_recording import (
    COMPARED,
    ROUND,
    Sizes,
    compare_recording,
    reversed_gaps,
)
from benchmarks.validate.domains import DomainWorkload, TextWorkload
from eaas.config import ClusterConfig, load_config
from eaas_cli.bench.load import LoadResult, run_load
from eaas_cli.bench.worker import with_fork_server
from eaas_cli.local import LocalCluster
from eaas_cli.local.fork_server import CLIENT_MODULES, CONTROL_MODULES, SERVER_MODULES, ForkServer

__all__ = ["TOLERANCE", "validate"]

TOLERANCE = 0.1
# Burst of a domain, in batches.
_BURST_BATCHES = 3
# Requests of a single user; requests per user in the measurement of the capacity.
_ALONE, _EACH = 5, 3
_RESAMPLES = 2000

Document = dict[str, Any]
Texts = Sequence[Sequence[int]]


@dataclass
class _Measured:
    """A cluster and its measurements."""

    strategy: str
    cluster: LocalCluster
    record: Path
    alone: LoadResult = field(default_factory=LoadResult)
    lives: list[LoadResult] = field(default_factory=list)


def validate(
    model: Path,
    config_file: Path | None,
    strategies: Sequence[str],
    sizes: Sizes,
    arrivals: Callable[[int, float], Sequence[float]],
    *,
    texts: Texts,
    servers: int,
    redundancy: int,
    say: Callable[[str], None],
    fork_server: ForkServer | None = None,
) -> Document:
    """Measure a cluster under each strategy, and simulate it.

    The clusters take turns in many short rounds (A B B A ...), so that compared loads are close in time. A
    round has a load with reversed arrivals, to which the engine is fitted, and the compared load;
    their order alternates. Steps are fitted and simulated in units of the machine's recorded pace, because
    the speed of a shared machine changes within seconds.

    Args:
        model: Checkpoint.
        config_file: Settings of the clusters; strategy and sizes of the scheduler are replaced.
        strategies: Names of strategies.
        sizes: Sizes of the loads.
        arrivals: Maps a number and a rate (requests/s) to arrival times in seconds.
        texts: Tokens of a text per domain. Empty: synthetic domains.
        servers, redundancy: Sizes of each cluster.
        say: Prints a line of progress.
        fork_server: Forks the processes, and keeps running afterwards. None: the run starts its own.

    Returns:
        JSON, for each strategy: live and simulated P50 (ms) and throughput (requests/s) of each round; the
        error of their means with its 95 % interval; the same error with the compared load's own steps and
        pace, which leaves out the engine's speed. `within`: whether all errors of the first kind are within
        the tolerance. `live_change`: means of live figures over those of the first strategy, with intervals.

    Raises:
        EaasError: A process did not start, or a request failed.
    """
    with contextlib.ExitStack() as stack:
        forks = stack.enter_context(
            with_fork_server(CONTROL_MODULES + SERVER_MODULES + CLIENT_MODULES, fork_server)
        )
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        all_measured: list[_Measured] = []
        for number, name in enumerate(strategies):
            say(f"{name}: starting a cluster ...")
            record = directory / f"queue{number}.jsonl"
            settings = _settings(config_file, name, sizes, record)
            path = directory / f"cluster{number}.yaml"
            path.write_text(yaml.safe_dump(settings.model_dump()))
            cluster = LocalCluster(
                model,
                servers=servers,
                redundancy=redundancy,
                config=settings,
                config_file=path,
                fork_server=forks,
            )
            all_measured.append(_Measured(name, stack.enter_context(cluster), record))
        batch_tokens = settings.attention_client.max_batch_tokens
        loads = _Loads(sizes, texts)
        for measured in all_measured:
            # Warm-up: memory and connections.
            loads.closed(measured, 2 * sizes.batch_size)
            measured.alone = loads.closed(measured, 1)
        full = loads.closed(all_measured[0], 2 * sizes.batch_size)
        rate = sizes.load * len(full.e2e_s) / full.seconds
        arrival_s = list(arrivals(sizes.requests, rate))
        say(f"{rate:.1f} requests/s ...")
        for number in range(sizes.rounds):
            say(f"round {number + 1} of {sizes.rounds} ...")
            for measured in all_measured if number % 2 == 0 else reversed(all_measured):
                for compared in ROUND[number % 2]:
                    at_s = arrival_s if compared else reversed_gaps(arrival_s)
                    done = loads.open(measured, 2 * number + compared, at_s)
                    if compared:
                        measured.lives.append(done)
        for measured in all_measured:
            measured.cluster.stop()  # completes the recording
        rows = [_row(measured, arrival_s, sizes, batch_tokens) for measured in all_measured]
    for row in rows:
        row |= _live_change(row["rounds"], rows[0]["rounds"])
    errors = [abs(error) for row in rows for error in row["error"].values()]
    return {
        "model": model.name,
        "servers": servers,
        "redundancy": redundancy,
        "sizes": vars(sizes),
        "rate_per_s": round(rate, 2),
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


class _Loads:
    """Sends loads to clusters. Loads of a cluster have different prompts, the same for all clusters."""

    def __init__(self, sizes: Sizes, texts: Texts) -> None:
        self._sizes, self._texts = sizes, texts

    def closed(self, measured: _Measured, users: int) -> LoadResult:
        """A closed loop of users."""
        requests = _ALONE if users == 1 else _EACH * users
        # Prompts after those of all rounds.
        first = (2 * self._sizes.rounds + users) * self._sizes.requests
        return run_load(measured.cluster.endpoint, self._workload(requests, users, first))

    def open(self, measured: _Measured, number: int, arrival_s: Sequence[float]) -> LoadResult:
        """An open loop with these arrivals."""
        requests = self._sizes.requests
        workload = self._workload(requests, 1, number * requests)
        return run_load(measured.cluster.endpoint, workload, arrival_s)

    def _workload(self, requests: int, users: int, first: int) -> DomainWorkload:
        sizes = self._sizes
        amount = requests, users, sizes.prompt_tokens, sizes.output_tokens
        burst = _BURST_BATCHES * sizes.batch_size
        if self._texts:
            return TextWorkload(*amount, burst, first, self._texts)
        return DomainWorkload(*amount, burst, first)


def _row(
    measured: _Measured, arrival_s: Sequence[float], sizes: Sizes, batch_tokens: int
) -> Document:
    before = _EACH * 2 * sizes.batch_size
    rounds = compare_recording(
        measured.record, sizes, batch_tokens, arrival_s, before, measured.alone, measured.lives
    )
    row: Document = {"strategy": measured.strategy}
    for kind in ("simulated", "simulated_own_steps"):
        changes = {
            key: _change(
                [each[kind][key] for each in rounds], [each["live"][key] for each in rounds]
            )
            for key in COMPARED
        }
        name = kind.replace("simulated", "error")
        row[name] = {key: change for key, (change, _) in changes.items()}
        row[f"{name}_ci95"] = {key: interval for key, (_, interval) in changes.items()}
    return row | {"rounds": rounds}


def _live_change(rounds: Sequence[Document], base: Sequence[Document]) -> Document:
    changes = {
        key: _change([each["live"][key] for each in rounds], [each["live"][key] for each in base])
        for key in rounds[0]["live"]
    }
    return {
        "live_change": {key: change for key, (change, _) in changes.items()},
        "live_change_ci95": {key: interval for key, (_, interval) in changes.items()},
    }


def _change(values: Sequence[float], base: Sequence[float]) -> tuple[float, list[float]]:
    """Change of the rounds' mean against `base`, with its 95 % bootstrap interval."""
    value_N, base_N = np.array(values), np.array(base)
    drawn = np.random.default_rng(0).integers(len(value_N), size=(_RESAMPLES, len(value_N)))
    ratios = value_N[drawn].mean(axis=1) / base_N[drawn].mean(axis=1) - 1
    interval = [round(float(end), 4) for end in np.percentile(ratios, (2.5, 97.5))]
    return round(float(value_N.mean() / base_N.mean() - 1), 4), interval
