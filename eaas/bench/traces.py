"""`eaas bench traces`: what tracing costs. Clusters that differ in it, in turn, in one run."""

from __future__ import annotations

import platform
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from eaas.bench.load import Workload, run_load
from eaas.bench.machine import processor, processor_s
from eaas.bench.worker import nursing
from eaas.cli.client import fetch_status
from eaas.config import load_config
from eaas.cores import usable_cores
from eaas.errors import ConfigError
from eaas.local import LocalCluster
from eaas.local.nursery import CLIENT_MODULES, CONTROL_MODULES, SERVER_MODULES, Nursery
from eaas.types import Role

__all__ = ["bench_traces"]

_MEASURED = (Role.ATTENTION_CLIENT.value, Role.EXPERT_SERVER.value)


@dataclass
class _Way:
    """One of a pair of clusters, and what was measured of it."""

    cluster: LocalCluster
    pids: list[int]
    tokens: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0

    def run(self, workload: Workload) -> None:
        before = sum(map(processor_s, self.pids))
        result = run_load(self.cluster.endpoint, workload)
        self.cpu_s += sum(map(processor_s, self.pids)) - before
        self.tokens += result.tokens
        self.seconds += result.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_per_token_s(self) -> float:
        return self.cpu_s / self.tokens


def bench_traces(
    model: Path,
    *,
    servers: int,
    redundancy: int,
    transport: str,
    sampling: float,
    workload: Workload,
    rounds: int,
    pairs: int,
    say: Callable[[str], None],
    nursery: Nursery | None = None,
) -> dict[str, Any]:
    """Measure a cluster with tracing, and in turn with it one without; then another such pair, and so on.

    Two clusters that differ in nothing differ in speed by some percent, for as long as they live: one pair
    alone says nothing of less than that. The spans go to a collector of this process, over the network as
    they would.

    Args:
        model: Checkpoint that both serve.
        servers: Expert servers of each.
        redundancy: Servers that hold each expert.
        transport: shm, grpc or nixl.
        sampling: Share of the requests that are traced.
        workload: Put on each in every round.
        rounds: Measured rounds of a pair, after one that is not counted; which of the two begins changes.
        pairs: Times that both are started anew; which of the two starts first changes.
        say: Progress, for people.
        nursery: Forks the processes; left running. By default one of its own does.

    Returns:
        The document of `eaas bench traces --json`. `ratio` has each pair's ratio, with tracing to without, of
        all its rounds together, and their median; `spans` is what the collector was sent, by name.

    Raises:
        ConfigError: OpenTelemetry is not installed.
        EaasError: Something did not start, or a request failed.
    """
    try:
        from eaas.bench.otlp_sink import OtlpSink
    except ImportError as error:
        raise ConfigError(
            f"OpenTelemetry is missing ({error}): pip install 'expert-as-a-service[otel]'"
        ) from error
    settings = load_config(attention_client={"transport": transport, "port": 0})
    with ExitStack() as stack:
        sink = OtlpSink()
        stack.callback(sink.close)
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="eaas-bench-")))
        forks = stack.enter_context(
            nursing(CONTROL_MODULES + SERVER_MODULES + CLIENT_MODULES, nursery)
        )
        measured = []
        for pair in range(pairs):
            with ExitStack() as clusters:
                ways = {}
                for name in ("off", "on") if pair % 2 == 0 else ("on", "off"):
                    say(f"starting pair {pair + 1} of {pairs}: tracing {name} ...")
                    telemetry = {
                        "traces": name == "on",
                        "sampling": sampling,
                        "endpoint": sink.endpoint,
                    }
                    file = scratch / f"{name}.yaml"
                    file.write_text(yaml.safe_dump({"telemetry": telemetry}))
                    cluster = clusters.enter_context(
                        LocalCluster(
                            model,
                            servers=servers,
                            redundancy=redundancy,
                            config=settings,
                            config_file=file,
                            nursery=forks,
                        )
                    )
                    members = fetch_status(cluster.endpoint)["members"]
                    ways[name] = _Way(
                        cluster, [m["pid"] for m in members if m["role"] in _MEASURED]
                    )
                _measure(ways["off"], ways["on"], workload, rounds, say)
                measured.append((ways["off"], ways["on"]))
    # The clusters have ended, and with that sent what they had.
    return {
        "machine": {
            "processor": processor(),
            "cores": usable_cores(),
            "python": platform.python_version(),
        },
        "model": model.name,
        "servers": servers,
        "redundancy": redundancy,
        "transport": transport,
        "sampling": sampling,
        "workload": vars(workload),
        "rounds": rounds,
        "pairs": pairs,
        "decode_tokens_per_s": _compared(
            [(off.tokens_per_s, on.tokens_per_s) for off, on in measured], 1.0
        ),
        "cpu_ms_per_token": _compared(
            [(off.cpu_per_token_s, on.cpu_per_token_s) for off, on in measured], 1e3
        ),
        "spans": sink.spans(),
    }


def _measure(
    off: _Way, on: _Way, workload: Workload, rounds: int, say: Callable[[str], None]
) -> None:
    say("warming up ...")
    for way in (off, on):
        run_load(way.cluster.endpoint, workload)
    for number in range(rounds):
        say(f"round {number + 1} of {rounds}")
        for way in (off, on) if number % 2 else (on, off):
            way.run(workload)


def _compared(pairs: list[tuple[float, float]], unit: float) -> dict[str, Any]:
    """Medians over the pairs of both values, times the unit, and the ratios of the second to the first."""
    ratios = [on / off for off, on in pairs]
    return {
        "off": round(statistics.median(off for off, _ in pairs) * unit, 4),
        "on": round(statistics.median(on for _, on in pairs) * unit, 4),
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
    }
