"""The runs of `eaas bench failover` (EaaS section 5.4: servers fail one after another while others serve)."""

from __future__ import annotations

import platform
import random
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eaas.bench.failover.account import Strike, lost, phases, timeline
from eaas.bench.failover.streams import Round, Streams
from eaas.bench.machine import processor, processor_s
from eaas.bench.worker import nursing
from eaas.cli.client import fetch_status
from eaas.config import load_config
from eaas.cores import usable_cores
from eaas.errors import ClusterError
from eaas.local import LocalCluster
from eaas.local.nursery import CLIENT_MODULES, CONTROL_MODULES, SERVER_MODULES, Nursery
from eaas.local.process import ChildProcess

__all__ = ["KINDS", "bench_failover"]

KINDS = ("kill", "hang")
_PROMPT_TOKENS = 16
# A fault comes when this share of the round without it would be over.
_STRIKE_AT = 0.25
# A hung server is let go on after this: its lease (2 s) is gone by then.
_HANG_S = 2.5
_BACK_S = 60.0
_LOOK_S = 0.25
_BIN_S = 0.25
# Of a fixed group, until one meets its fault.
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
    nursery: Nursery | None = None,
) -> dict[str, Any]:
    """Faults one after another on a running cluster, and the same on one that has to be started again.

    Args:
        model: Checkpoint.
        servers: Expert servers.
        redundancy: Servers that hold each expert.
        faults: How many.
        kinds: Of `KINDS`, in turn. "kill": SIGKILL, and started again at once. "hang": SIGSTOP for 2.5 s.
        streams: Answers at a time.
        max_tokens: Of each answer.
        fixed_group: Measure what a fixed group does, too: every fault ends all of it.
        seed: Draws the victims.
        transport: shm, grpc or nixl.
        say: Progress, for people.
        nursery: Forks the processes; left running. By default one of its own does.

    Returns:
        The document of `eaas bench failover --json`.

    Raises:
        EaasError: Something did not start, or did not come back.
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
        nursing(CONTROL_MODULES + SERVER_MODULES + CLIENT_MODULES, nursery) as forks,
        LocalCluster(
            model, servers=servers, redundancy=redundancy, config=settings, nursery=forks
        ) as cluster,
    ):
        bench = _Bench(cluster, prompts, max_tokens, redundancy)
        say("warming up ...")
        # Twice: the second one says how long a round takes.
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
    """A running cluster and the work of a round."""

    def __init__(
        self, cluster: LocalCluster, prompts: list[list[int]], max_tokens: int, redundancy: int
    ) -> None:
        self.prompts = prompts
        self.max_tokens = max_tokens
        self._cluster = cluster
        self._redundancy = redundancy
        self._usual_s = 0.0

    def quiet(self) -> Round:
        """A round without a fault."""
        quiet = self._begin().result()
        self._usual_s = quiet.seconds
        return quiet

    def _begin(self) -> Streams:
        return Streams(lambda: self._cluster.endpoint, self.prompts, self.max_tokens)

    def strike(self, kind: str, server: str, *, quiet_first: bool) -> Strike:
        """The two rounds of a fault."""
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
        # It has just begun to serve.
        return processor_s(self._child(server).pid)

    def _hang(self, server: str) -> float:
        child = self._child(server)
        child.signal(signal.SIGSTOP)
        try:
            time.sleep(_HANG_S)
        finally:
            child.signal(signal.SIGCONT)
        # It loads nothing, and nobody is started.
        return 0.0

    def _child(self, server: str) -> ChildProcess:
        return self._cluster.children[server]

    def _wait_back(self) -> float:
        """When every expert has all of its replicas, and every server serves."""
        deadline = time.monotonic() + _BACK_S
        while time.monotonic() < deadline:
            now = time.monotonic()
            document = fetch_status(self._cluster.endpoint)
            states = [m["state"] for m in document["members"] if m["role"] == "expert-server"]
            if set(states) == {"SERVING"} and (
                document["coverage"]["min_replicas"] >= self._redundancy
            ):
                return now
            time.sleep(_LOOK_S)
        raise ClusterError(f"the cluster was not whole again after {_BACK_S:.0f} s")

    def restart_all(self, server: str) -> dict[str, Any]:
        """A round of a fixed group: what ends one process of it ends all, and all are started again.

        Raises:
            ClusterError: Rounds are over before their fault.
        """
        for _ in range(_ROUNDS):
            entry = self._restart_all(server)
            if _after(entry):
                return entry
            # It was a quiet one.
            self._usual_s = entry["round"].seconds
        raise ClusterError("rounds are over before their fault: make them longer (--max-tokens)")

    def _restart_all(self, server: str) -> dict[str, Any]:
        cluster = self._cluster
        streams = self._begin()
        try:
            time.sleep(_STRIKE_AT * self._usual_s)
            at = time.monotonic()
            # Nobody says goodbye: a collective that lost a member hangs, and its processes are killed.
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
        "machine": {"processor": processor(), "cores": cores, "python": platform.python_version()},
        "model": model.name,
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
    """When pieces of text came after the fault."""
    return [s for answer in entry["round"].answers for s in answer.stamps_s if s > entry["at"]]


def _pause(entry: dict[str, Any]) -> float:
    """From the fault to the first piece of text after it."""
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
