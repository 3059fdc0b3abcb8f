"""The run: servers fail one after another while the others serve (EaaS section 5.4)."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.failover.account import Strike, lost, phases, timeline
from benchmarks.failover.streams import Round, Streams
from eaas.config import load_config
from eaas.cores import usable_cores
from eaas.errors import ClusterError
from eaas.hub_cache import model_name
from eaas_cli.bench.machine import describe_machine, processor_s
from eaas_cli.bench.worker import with_fork_server
from eaas_cli.endpoint import fetch_status
from eaas_cli.local import LocalCluster
from eaas_cli.local.fork_server import CLIENT_MODULES, CONTROL_MODULES, SERVER_MODULES, ForkServer
from eaas_cli.local.process import ChildProcess

__all__ = ["KINDS", "bench_failover"]

KINDS = ("kill", "hang")
_PROMPT_TOKENS = 16
# Time of the fault in its round, as a share of the quiet round's duration.
_STRIKE_AT = 0.25
# A hung server resumes after this many seconds, when its lease (2 s) has expired.
_HANG_S = 2.5
_BACK_S = 60.0
_POLL_S = 0.25
_BIN_S = 0.25
# Largest number of attempts at a fixed-group round that lasts beyond its fault.
_ROUNDS = 3


def bench_failover(
    model: Path,
    *,
    servers: int,
    redundancy: int,
    faults: int,
    kinds: Sequence[str],
    streams: int,
    max_tokens: int,
    fixed_group: bool,
    seed: int,
    transport: str,
    say: Callable[[str], None],
    fork_server: ForkServer | None = None,
) -> dict[str, Any]:
    """Inject faults one after another into a running cluster, then into a fixed group.

    Args:
        kinds: Some of `KINDS`, in turn. "kill": SIGKILL and restart. "hang": SIGSTOP for 2.5 s.
        fixed_group: Also measure a fixed group: every fault restarts all of it.
        fork_server: Forks the processes, and keeps running afterwards. None: the run starts its own.

    Returns:
        The JSON document.

    Raises:
        EaasError: A process did not start, or the cluster did not recover.
    """
    settings = load_config(attention_client={"transport": transport, "port": 0})
    dice = random.Random(seed)
    drawn = [
        (kinds[i % len(kinds)], f"expert-server-{dice.randrange(servers)}") for i in range(faults)
    ]
    prompts = [
        np.random.default_rng(seed * 1000 + i).integers(16, 250, _PROMPT_TOKENS).tolist()
        for i in range(streams)
    ]
    with (
        with_fork_server(CONTROL_MODULES + SERVER_MODULES + CLIENT_MODULES, fork_server) as forks,
        LocalCluster(
            model, servers=servers, redundancy=redundancy, config=settings, fork_server=forks
        ) as cluster,
    ):
        bench = _Bench(cluster, prompts, max_tokens, redundancy)
        say("warming up ...")
        # Run two rounds, because the second one gives the duration.
        bench.quiet(), bench.quiet()
        strikes = []
        for number, (kind, server) in enumerate(drawn):
            strikes.append(bench.strike(kind, server, quiet_first=number % 2 == 0))
            say(f"fault {number + 1} of {faults}: {kind} of {server}")
        restarts = []
        for number, (_, server) in enumerate(drawn if fixed_group else ()):
            restarts.append(bench.restart_all(server))
            say(f"fixed group, fault {number + 1} of {faults}: restart")
    return _document(strikes, restarts, servers, redundancy, transport, model, seed, vars(bench))


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

    def quiet(self) -> Round:
        """Run a round of streams without a fault."""
        quiet = self._begin().result()
        self._usual_s = quiet.seconds
        return quiet

    def _begin(self) -> Streams:
        return Streams(lambda: self._cluster.endpoint, self.prompts, self.max_tokens)

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
            streams.give_up()
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

    def restart_all(self, server: str) -> dict[str, Any]:
        """Run a round of a fixed group, in which the end of one process ends all, and all are restarted.

        Raises ClusterError: rounds end before their fault.
        """
        for _ in range(_ROUNDS):
            entry = self._restart_all(server)
            if _after(entry):
                return entry
            # The round ended before the fault.
            self._usual_s = entry["round"].seconds
        raise ClusterError("rounds end before their fault: make them longer (--max-tokens)")

    def _restart_all(self, server: str) -> dict[str, Any]:
        cluster = self._cluster
        streams = self._begin()
        try:
            time.sleep(_STRIKE_AT * self._usual_s)
            at = time.monotonic()
            # Kill all, because a collective that lost a member hangs.
            self._child(server).signal(signal.SIGKILL)
            for child in cluster.children.values():
                child.signal(signal.SIGKILL)
            cluster.stop()
            cluster.start()
            back = time.monotonic()
            faulted = streams.result()
        finally:
            streams.give_up()
        return {"at": at, "back": back, "round": faulted}


def _document(
    strikes: list[Strike],
    restarts: list[dict[str, Any]],
    servers: int,
    redundancy: int,
    transport: str,
    model: Path,
    seed: int,
    work: dict[str, Any],
) -> dict[str, Any]:
    cores = usable_cores()
    quiet, faulted = [s.quiet for s in strikes], [s.faulted for s in strikes]
    sums = lost(strikes, cores)
    document: dict[str, Any] = {
        "machine": describe_machine(),
        "model": model_name(model),
        "servers": servers,
        "redundancy": redundancy,
        "transport": transport,
        "seed": seed,
        "workload": {"streams": len(work["prompts"]), "max_tokens": work["max_tokens"]},
        "faults": [_row(strike) for strike in strikes],
        "lost": {name: round(value, 4) for name, value in sums.items()},
        "phases_tokens_per_s": {name: round(v, 1) for name, v in phases(strikes).items()},
        "failed_requests": sum(len(r.failed) for r in (*quiet, *faulted)),
        "wrong_answers": sum(strike.wrong for strike in strikes),
        "worst_stall_ms": {
            "quiet": _ms(max(r.stall_s for r in quiet)),
            "faulted": _ms(max(r.stall_s for r in faulted)),
        },
        "timeline": {"quiet": timeline(quiet, _BIN_S), "faulted": timeline(faulted, _BIN_S)},
    }
    if restarts:
        rounds: list[Round] = [entry["round"] for entry in restarts]
        rate = sum(r.tokens for r in rounds) / sum(r.seconds for r in rounds)
        down = [entry["back"] - entry["at"] for entry in restarts]
        document["fixed_group"] = {
            "tokens_per_s": round(rate, 1),
            "lost": round(1 - rate / sums["tokens_per_s_quiet"], 4),
            "failed_requests": sum(len(r.failed) for r in rounds),
            "down_s": {"mean": round(sum(down) / len(down), 2), "worst": round(max(down), 2)},
            "worst_pause_ms": _ms(max(_pause(entry) for entry in restarts)),
        }
        document["timeline"]["fixed_group"] = timeline(rounds, _BIN_S)
    return document


def _after(entry: dict[str, Any]) -> list[float]:
    """Times of the pieces of text that came after the fault."""
    return [s for answer in entry["round"].answers for s in answer.stamps_s if s > entry["at"]]


def _pause(entry: dict[str, Any]) -> float:
    """Seconds from the fault to the next piece of text of any stream."""
    return min(_after(entry)) - float(entry["at"])


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
