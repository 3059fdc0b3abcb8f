"""The same arrivals on live clusters and in simulated time, strategy by strategy."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from eaas.bench.compare_recording import COMPARED, ROUND, Sizes, compare_recording, reversed_gaps
from eaas.bench.domains import DomainWorkload, TextWorkload
from eaas.bench.load import LoadResult, run_load
from eaas.bench.worker import nursing
from eaas.config import ClusterConfig, load_config
from eaas.local import LocalCluster
from eaas.local.nursery import CLIENT_MODULES, CONTROL_MODULES, SERVER_MODULES, Nursery

__all__ = ["TOLERANCE", "validate"]

TOLERANCE = 0.1
# Requests in a row of one domain, in batches.
_BURST_BATCHES = 3
# Requests of a user who is alone; of each of many who show what the cluster can do.
_ALONE, _EACH = 5, 3
_RESAMPLES = 2000

Document = dict[str, Any]
Texts = Sequence[Sequence[int]]


@dataclass
class _Measured:
    """A cluster and what was measured of it."""

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
    nursery: Nursery | None = None,
) -> Document:
    """Measure a cluster under each strategy, and simulate it.

    All clusters stand ready and take turns in many short rounds, there and back (A B B A ...), so that what
    they are compared with is near in time. A round is a load with the compared arrivals in reversed order, to
    which the engine is fitted, and the compared load, in turn before and after it. Steps are fitted and
    simulated in units of the machine's pace, which each recording has beside its steps: the speed of a
    machine that others use too changes within seconds.

    Args:
        model: Checkpoint.
        config_file: Settings of the clusters; of their schedulers, strategy and sizes are set here.
        strategies: Names.
        sizes: Of the loads.
        arrivals: From their number and a rate (requests/s) to the seconds at which requests come. The rate is
            that of the first strategy for all.
        texts: Tokens that prompts are taken from, a domain each. Empty: domains are drawn.
        servers, redundancy: Of each cluster.
        say: Progress, for people.
        nursery: Forks the processes; left running. By default one of its own does.

    Returns:
        JSON: for each strategy the live and simulated P50 (ms) and throughput (requests/s) of each round, the
        error of their means with its 95 % interval, and that of a simulation with the compared load's own
        steps and the pace that they had at each time: what is left if the engine's speed is known. `within`:
        whether all errors of the first kind are. `live_change`: means of live figures against those of the
        first strategy, with intervals.

    Raises:
        EaasError: Something did not start, or a request failed.
    """
    with contextlib.ExitStack() as stack:
        forks = stack.enter_context(
            nursing(CONTROL_MODULES + SERVER_MODULES + CLIENT_MODULES, nursery)
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
                nursery=forks,
            )
            all_measured.append(_Measured(name, stack.enter_context(cluster), record))
        batch_tokens = settings.attention_client.max_batch_tokens
        loads = _Loads(sizes, texts)
        for measured in all_measured:
            # A first load that does not count: memory is touched, connections are made.
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
            measured.cluster.stop()  # its recording is whole
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
    """Puts loads on clusters; each of a cluster's has prompts of its own, the same for all clusters."""

    def __init__(self, sizes: Sizes, texts: Texts) -> None:
        self._sizes, self._texts = sizes, texts

    def closed(self, measured: _Measured, users: int) -> LoadResult:
        """So many users at a time."""
        requests = _ALONE if users == 1 else _EACH * users
        # Beyond those of all rounds.
        first = (2 * self._sizes.rounds + users) * self._sizes.requests
        return run_load(measured.cluster.endpoint, self._workload(requests, users, first))

    def open(self, measured: _Measured, number: int, arrival_s: Sequence[float]) -> LoadResult:
        """Requests at those times."""
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
    """Of the rounds' mean against another one, and its 95 % interval: rounds are drawn again (bootstrap)."""
    value_N, base_N = np.array(values), np.array(base)
    drawn = np.random.default_rng(0).integers(len(value_N), size=(_RESAMPLES, len(value_N)))
    ratios = value_N[drawn].mean(axis=1) / base_N[drawn].mean(axis=1) - 1
    interval = [round(float(end), 4) for end in np.percentile(ratios, (2.5, 97.5))]
    return round(float(value_N.mean() / base_N.mean() - 1), 4), interval
