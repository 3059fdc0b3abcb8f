"""The same arrivals on live clusters and in simulated time, strategy by strategy."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from eaas.bench.compare_recording import COMPARED, FitLoad, Sizes, compare_recording
from eaas.bench.load import LoadResult, Workload, run_load
from eaas.config import ClusterConfig, load_config
from eaas.local import LocalCluster

__all__ = ["TOLERANCE", "DomainWorkload", "validate"]

TOLERANCE = 0.1
# Prompts: so many domains with so many tokens each, and requests in a row of one of them, in batches.
_DOMAINS, _DOMAIN_TOKENS, _BURST_BATCHES = 8, 6, 3

Document = dict[str, Any]


@dataclass(frozen=True)
class DomainWorkload(Workload):
    """Prompts of a few domains, in bursts of one domain each.

    Attributes:
        burst: Requests in a row of one domain.
    """

    burst: int

    def prompt(self, index: int) -> list[int]:
        """Tokens of its domain, each as frequent as words are (Zipf)."""
        domain = np.random.default_rng(index // self.burst % _DOMAINS)
        tokens = domain.choice(np.arange(16, 250), _DOMAIN_TOKENS, replace=False)
        chance = 1 / np.arange(1, _DOMAIN_TOKENS + 1)
        own = np.random.default_rng([index, self.burst])
        drawn = own.choice(tokens, self.prompt_tokens, p=chance / chance.sum())
        return [int(token) for token in drawn]


@dataclass
class _Measured:
    """A cluster and what was measured of it: two fits for each of the lives, before and after it."""

    strategy: str
    cluster: LocalCluster
    record: Path
    fits: list[FitLoad] = field(default_factory=list)
    lives: list[LoadResult] = field(default_factory=list)


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
    All clusters stand ready and take turns, round by round, so that what they are compared with is near in
    time: the speed of a machine that others use too changes within seconds.

    Args:
        model: Checkpoint.
        config_file: Settings of the clusters; of their schedulers, strategy and sizes are set here.
        strategies: Names.
        sizes: Of the loads.
        arrivals: From their number and a rate (requests/s) to the seconds at which requests come. The rate is
            that of the first strategy for all.
        servers, redundancy: Of each cluster.
        say: Progress, for people.

    Returns:
        JSON: for each strategy the live and simulated P50 (ms) and throughput (requests/s) of each round, the
        median of their errors, and that of a simulation with the compared load's own steps and the pace that
        they had at each time: what is left if the machine's speed is known. `within`: whether all errors of
        the first kind are. `live_change`: live figures against those of the first strategy, medians of the
        rounds' ratios less 1.

    Raises:
        EaasError: Something did not start, or a request failed.
    """
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        all_measured: list[_Measured] = []
        for number, name in enumerate(strategies):
            say(f"{name}: starting a cluster ...")
            record = directory / f"queue{number}.jsonl"
            settings = _settings(config_file, name, sizes, record)
            path = directory / f"cluster{number}.yaml"
            path.write_text(yaml.safe_dump(settings.model_dump()))
            cluster = LocalCluster(
                model, servers=servers, redundancy=redundancy, config=settings, config_file=path
            )
            all_measured.append(_Measured(name, stack.enter_context(cluster), record))
        batch_tokens = settings.attention_client.max_batch_tokens
        for measured in all_measured:
            # A first load that does not count: memory is touched, connections are made.
            _fit_load(measured.cluster.endpoint, sizes)
        rate = sizes.load * _fit_load(all_measured[0].cluster.endpoint, sizes).capacity_per_s
        arrival_s = list(arrivals(sizes.requests, rate))
        for number in range(sizes.rounds):
            say(f"round {number + 1} of {sizes.rounds}, {rate:.1f} requests/s ...")
            for measured in all_measured:
                endpoint = measured.cluster.endpoint
                measured.fits.append(_fit_load(endpoint, sizes))
                workload = _workload(sizes, sizes.requests, 1)
                measured.lives.append(run_load(endpoint, workload, arrival_s))
                measured.fits.append(_fit_load(endpoint, sizes))
        for measured in all_measured:
            measured.cluster.stop()  # its recording is whole
        rows = [_row(measured, arrival_s, sizes, batch_tokens) for measured in all_measured]
    for row in rows:
        row["live_change"] = _change(row["rounds"], rows[0]["rounds"])
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


def _workload(sizes: Sizes, requests: int, concurrency: int) -> Workload:
    return DomainWorkload(
        requests,
        concurrency,
        sizes.prompt_tokens,
        sizes.output_tokens,
        _BURST_BATCHES * sizes.batch_size,
    )


def _fit_load(endpoint: str, sizes: Sizes) -> FitLoad:
    """What the engine is measured with: closed-loop, so many users at a time."""
    loads = [
        run_load(endpoint, _workload(sizes, requests, users)) for requests, users in sizes.fit_loads
    ]
    return FitLoad(float(np.median(loads[0].e2e_s)), len(loads[-1].e2e_s) / loads[-1].seconds)


def _row(
    measured: _Measured, arrival_s: Sequence[float], sizes: Sizes, batch_tokens: int
) -> Document:
    rounds = compare_recording(
        measured.record, sizes, batch_tokens, arrival_s, measured.fits, measured.lives
    )
    return {
        "strategy": measured.strategy,
        "error": _median(rounds, "error"),
        "error_own_steps": _median(rounds, "error_own_steps"),
        "rounds": rounds,
    }


def _median(rounds: Sequence[Document], kind: str) -> dict[str, float]:
    return {
        key: round(statistics.median(each[kind][key] for each in rounds), 4) for key in COMPARED
    }


def _change(rounds: Sequence[Document], base: Sequence[Document]) -> dict[str, float]:
    return {
        key: round(
            statistics.median(
                each["live"][key] / other["live"][key] - 1
                for each, other in zip(rounds, base, strict=True)
            ),
            4,
        )
        for key in rounds[0]["live"]
    }
