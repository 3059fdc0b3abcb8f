"""Measure the throughput with faults against that of the same work: `python -m benchmarks.failover`.

Servers fail one after another while the others serve (the EaaS paper, section 5.4). Each fault has two rounds
with the same work: one without it (quiet) and one with it (faulted). Their difference is the fault's cost.

Capacity. On one machine a dead server frees its processor time for the others. The lost capacity is the
processor time that the replacement takes to start and load, as a share of the machine's cores over the
faulted rounds. The loss beyond that is the cost of the failover: detection, repeated work, cold caches, the
control plane.
"""

from __future__ import annotations

import random
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from benchmarks.harness.worker import processor_s
from eaas.config import load_config
from eaas.cores import usable_cores
from eaas.errors import ClusterError
from eaas.hub_cache import model_name
from eaas_cli.bench.command import command, end_on_sigterm, model_or_demo, say, show
from eaas_cli.bench.load import Load, LoadResult, Workload
from eaas_cli.bench.machine import describe_machine
from eaas_cli.commands.options import DemoModel, Json, Transport
from eaas_cli.console import print_figures, print_rows
from eaas_cli.endpoint import fetch_status
from eaas_cli.errors import exit_with_one_line
from eaas_cli.local import LocalCluster
from eaas_cli.local.process import ChildProcess
from eaas_cli.option_values import known

__all__ = ["Strike", "lost"]

_KINDS = ("kill", "hang")
_PROMPT_TOKENS = 16
# Time of the fault in its round, as a share of the quiet round's duration.
_STRIKE_AT = 0.25
# A hung server resumes after this many seconds, when its lease (2 s) has expired.
_HANG_S = 2.5
# Longest wait until the cluster is whole again.
_BACK_S = 60.0
_POLL_S = 0.25


def main(
    model: DemoModel = None,
    servers: Annotated[int, typer.Option(min=2, help="Expert servers.")] = 8,
    redundancy: Annotated[int, typer.Option(min=1, help="Servers that hold each expert.")] = 2,
    faults: Annotated[int, typer.Option(min=1, help="Number of faults, one after another.")] = 10,
    kind: Annotated[
        str,
        typer.Option(help="kill (SIGKILL and restart), hang (SIGSTOP for 2.5 s), or both in turn."),
    ] = "kill",
    streams: Annotated[int, typer.Option(min=1, help="Answers at a time.")] = 4,
    max_tokens: Annotated[int, typer.Option(min=16, help="Tokens per answer.")] = 400,
    transport: Transport = "shm",
    seed: Annotated[int, typer.Option(help="Seed of the victims and the prompts.")] = 1,
    as_json: Json = False,
) -> None:
    """Measure the throughput with faults against that of the same work without them."""
    end_on_sigterm()
    kinds = known("--kind", _KINDS if kind == "both" else [kind], _KINDS)
    settings = load_config(attention_client={"transport": transport}, frontend={"port": 0})
    dice = random.Random(seed)
    drawn = [
        (kinds[i % len(kinds)], f"expert-server-{dice.randrange(servers)}") for i in range(faults)
    ]
    load = Workload(streams, streams, _PROMPT_TOKENS, max_tokens)
    prompts = [load.prompt(seed * 1000 + i) for i in range(streams)]
    with (
        model_or_demo(model) as checkpoint,
        LocalCluster(
            checkpoint, servers=servers, redundancy=redundancy, config=settings
        ) as cluster,
    ):
        bench = _Bench(cluster, prompts, max_tokens, redundancy)
        say("warming up ...")
        # Run two rounds, because the second one gives the duration.
        bench.quiet(), bench.quiet()
        strikes = []
        for number, (how, server) in enumerate(drawn):
            strikes.append(bench.strike(how, server, quiet_first=number % 2 == 0))
            say(f"fault {number + 1} of {faults}: {how} of {server}")
        setting = {
            "machine": describe_machine(),
            "model": model_name(checkpoint),
            "servers": servers,
            "redundancy": redundancy,
            "transport": transport,
            "seed": seed,
            "workload": {"streams": streams, "max_tokens": max_tokens},
        }
    show(setting | _document(strikes), as_json, _report)


@dataclass(frozen=True)
class Strike:
    """A fault, with its two rounds. Times are monotonic seconds.

    Attributes:
        back_s: Time when every expert had all of its replicas again.
        replacement_cpu_s: Processor time of the replacement's start and load.
        quiet: The round without the fault.
        faulted: The round with the fault.
    """

    kind: str
    server: str
    at_s: float
    back_s: float
    replacement_cpu_s: float
    quiet: LoadResult
    faulted: LoadResult

    @property
    def wrong(self) -> int:
        """Number of streams whose text differs from the quiet round."""
        pairs = zip(self.quiet.answers, self.faulted.answers, strict=True)
        return sum(before.text != after.text for before, after in pairs)


class _Bench:
    """A running cluster, the streams of a round, and the faults in it."""

    def __init__(
        self, cluster: LocalCluster, prompts: list[list[int]], max_tokens: int, redundancy: int
    ) -> None:
        self.prompts = prompts
        self.max_tokens = max_tokens
        self._cluster = cluster
        self._redundancy = redundancy
        self._usual_s = 0.0

    def quiet(self) -> LoadResult:
        """Run a round of streams without a fault."""
        quiet = self._begin().result()
        self._usual_s = quiet.seconds
        return quiet

    def _begin(self) -> Load:
        return Load(lambda: self._cluster.endpoint, self.prompts, self.max_tokens, again=True)

    def strike(self, kind: str, server: str, *, quiet_first: bool) -> Strike:
        """Run the two rounds of a fault: one with it, and one without it before or after."""
        quiet = self.quiet() if quiet_first else None
        streams = self._begin()
        try:
            time.sleep(_STRIKE_AT * self._usual_s)
            at = time.monotonic()
            cpu_s = self._kill(server) if kind == "kill" else self._hang(server)
            back = self._wait_back()
            faulted = streams.result()
        finally:
            streams.stop()
        return Strike(kind, server, at, back, cpu_s, quiet or self.quiet(), faulted)

    def _kill(self, server: str) -> float:
        self._child(server).signal(signal.SIGKILL)
        self._cluster.restart(server)
        # The replacement has used its processor time so far to start and load.
        return processor_s(self._child(server).pid)

    def _hang(self, server: str) -> float:
        child = self._child(server)
        child.signal(signal.SIGSTOP)
        try:
            time.sleep(_HANG_S)
        finally:
            child.signal(signal.SIGCONT)
        # A hung server has no replacement process.
        return 0.0

    def _child(self, server: str) -> ChildProcess:
        return self._cluster.children[server]

    def _wait_back(self) -> float:
        """Wait until every server serves and every expert has all of its replicas; return the time."""
        deadline = time.monotonic() + _BACK_S
        while time.monotonic() < deadline:
            now = time.monotonic()
            document = fetch_status(self._cluster.endpoint)
            states = [m["state"] for m in document["members"] if m["role"] == "expert-server"]
            if set(states) == {"SERVING"} and (
                document["coverage"]["min_replicas"] >= self._redundancy
            ):
                return now
            time.sleep(_POLL_S)
        raise ClusterError(f"the cluster was not whole again after {_BACK_S:.0f} s")


def _rate(rounds: Sequence[LoadResult]) -> float:
    return sum(r.tokens for r in rounds) / sum(r.seconds for r in rounds)


def lost(strikes: Sequence[Strike], cores: int) -> dict[str, float]:
    """Compute the losses by faults, as shares of the throughput without faults.

    Returns:
        `tokens_per_s_quiet`, `tokens_per_s_faulted`; `gross`: the lost share; `gross_error`: its standard
        error over the faults; `capacity`: processor time of replacements, as a share of the machine;
        `beyond_capacity`: gross minus capacity; `seconds_per_fault`: gross, in seconds of quiet work.
    """
    quiet, faulted = _rate([s.quiet for s in strikes]), _rate([s.faulted for s in strikes])
    seconds = sum(s.faulted.seconds for s in strikes)
    gross = 1 - faulted / quiet
    singly = [1 - s.quiet.seconds / s.faulted.seconds for s in strikes]
    error = statistics.stdev(singly) / len(singly) ** 0.5 if len(singly) > 1 else 0.0
    capacity = sum(s.replacement_cpu_s for s in strikes) / (cores * seconds)
    return {
        "tokens_per_s_quiet": quiet,
        "tokens_per_s_faulted": faulted,
        "gross": gross,
        "gross_error": error,
        "capacity": capacity,
        "beyond_capacity": gross - capacity,
        "seconds_per_fault": gross * seconds / len(strikes),
    }


def _document(strikes: list[Strike]) -> dict[str, Any]:
    quiet, faulted = [s.quiet for s in strikes], [s.faulted for s in strikes]
    sums = lost(strikes, usable_cores())
    return {
        "faults": [_row(strike) for strike in strikes],
        "lost": {name: round(value, 4) for name, value in sums.items()},
        "failed_requests": sum(len(r.failed) for r in (*quiet, *faulted)),
        "wrong_answers": sum(strike.wrong for strike in strikes),
        "worst_stall_ms": {
            "quiet": _ms(max(r.stall_s for r in quiet)),
            "faulted": _ms(max(r.stall_s for r in faulted)),
        },
    }


def _row(strike: Strike) -> dict[str, Any]:
    return {
        "kind": strike.kind,
        "server": strike.server,
        "quiet_s": round(strike.quiet.seconds, 3),
        "faulted_s": round(strike.faulted.seconds, 3),
        "tokens": strike.faulted.tokens,
        "failed": len(strike.faulted.failed),
        "wrong": strike.wrong,
        "stall_ms": _ms(strike.faulted.stall_s),
        "whole_again_s": round(strike.back_s - strike.at_s, 2),
        "within_round": strike.back_s <= strike.faulted.ended_s,
        "replacement_cpu_s": round(strike.replacement_cpu_s, 3),
    }


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)


def _report(document: dict[str, Any]) -> None:
    print_rows(document["faults"])
    print_figures(document)


app = command(main)

if __name__ == "__main__":
    exit_with_one_line(app)
