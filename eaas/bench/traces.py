"""`eaas bench traces`: what tracing costs. Two clusters that differ in it, in turn, in one run."""

from __future__ import annotations

import platform
import statistics
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from eaas.bench.load import LoadResult, Workload, run_load
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
    """One cluster, and what was measured of it."""

    cluster: LocalCluster
    pids: list[int]
    runs: list[LoadResult] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    def run(self, workload: Workload) -> None:
        before = sum(map(processor_s, self.pids))
        self.runs.append(run_load(self.cluster.endpoint, workload))
        self.cpu_s.append(sum(map(processor_s, self.pids)) - before)

    def rates(self) -> list[float]:
        return [run.tokens / run.seconds for run in self.runs]

    def cpu_per_token_s(self) -> list[float]:
        return [cpu / run.tokens for cpu, run in zip(self.cpu_s, self.runs, strict=True)]

    def document(self) -> dict[str, float]:
        return {
            "decode_tokens_per_s": round(statistics.median(self.rates()), 2),
            "cpu_ms_per_token": round(statistics.median(self.cpu_per_token_s()) * 1e3, 4),
        }


def bench_traces(
    model: Path,
    *,
    servers: int,
    redundancy: int,
    transport: str,
    sampling: float,
    workload: Workload,
    rounds: int,
    say: Callable[[str], None],
    nursery: Nursery | None = None,
) -> dict[str, Any]:
    """Measure a cluster with tracing, and in turn with it one without.

    The spans go to a collector of this process, over the network as they would.

    Args:
        model: Checkpoint that both serve.
        servers: Expert servers of each.
        redundancy: Servers that hold each expert.
        transport: shm, grpc or nixl.
        sampling: Share of the requests that are traced.
        workload: Put on each in every round.
        rounds: Measured rounds, after one that is not counted; which of the two begins changes.
        say: Progress, for people.
        nursery: Forks the processes; left running. By default one of its own does.

    Returns:
        The document of `eaas bench traces --json`. `ratio` has medians of the rounds' ratios, with tracing to
        without, and their quartiles; `spans` is what the collector was sent, by name.

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
        ways = []
        for name, traces in (("off", False), ("on", True)):
            say(f"starting the cluster with tracing {name} ...")
            telemetry = {"traces": traces, "sampling": sampling, "endpoint": sink.endpoint}
            file = scratch / f"{name}.yaml"
            file.write_text(yaml.safe_dump({"telemetry": telemetry}))
            cluster = stack.enter_context(
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
            ways.append(_Way(cluster, [m["pid"] for m in members if m["role"] in _MEASURED]))
        off, on = ways
        for number in range(rounds + 1):
            say(f"round {number} of {rounds}" if number else "warming up ...")
            for way in (off, on) if number % 2 else (on, off):
                way.run(workload)
            if not number:
                for way in ways:
                    way.runs.clear()
                    way.cpu_s.clear()
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
        "off": off.document(),
        "on": on.document(),
        "ratio": {
            "decode_tokens_per_s": _ratios(on.rates(), off.rates()),
            "cpu_per_token": _ratios(on.cpu_per_token_s(), off.cpu_per_token_s()),
        },
        "spans": sink.spans(),
    }


def _ratios(these: list[float], those: list[float]) -> dict[str, float]:
    ratios = sorted(a / b for a, b in zip(these, those, strict=True))
    quarter = len(ratios) // 4
    return {
        "median": round(statistics.median(ratios), 4),
        "from": round(ratios[quarter], 4),
        "to": round(ratios[-1 - quarter], 4),
    }
