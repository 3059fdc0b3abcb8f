"""The run: starts a cluster if needed, and runs aiperf against its endpoint, once per load."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.client.agree import disagreements, row
from benchmarks.client.aiperf import Asked, Run, command, read_run
from eaas.config import load_config
from eaas.errors import ConfigError, EaasError
from eaas.hub_cache import model_name
from eaas_cli.bench.machine import describe_machine
from eaas_cli.local import LocalCluster

__all__ = ["bench_client"]

_RUN_S = 600.0
_LINES = 15
# This stop string occurs early in every answer, so only min_tokens keeps an answer from ending there.
_STOP = "e"


def bench_client(
    aiperf: Path,
    model: Path,
    *,
    endpoint: str | None,
    servers: int,
    redundancy: int,
    transport: str,
    asked: Asked,
    rounds: int,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Run aiperf against an endpoint and compare its counts with the endpoint's.

    Args:
        aiperf: Program, version 0.13.
        model: Checkpoint; aiperf uses its tokenizer.
        endpoint: URL of a running endpoint; None: start a cluster.
        asked: Load of each round; the seed counts up.
        rounds: Number of rounds, before one with min_tokens, a stop string and the endpoint's counts.

    Returns:
        The JSON document. `wrong` is empty if every request succeeded and all counts agree.

    Raises:
        EaasError: aiperf is missing or failed, or the cluster did not start.
    """
    if not aiperf.exists():
        raise ConfigError(f"{aiperf} does not exist: make it with `make .venv-bench/.installed`")
    turns = [dataclasses.replace(asked, seed=asked.seed + number) for number in range(rounds)]
    turns.append(
        dataclasses.replace(asked, min_tokens=asked.max_tokens // 2, stop=_STOP, server_counts=True)
    )
    rows = []
    with _served(endpoint, model, servers, redundancy, transport, say) as url:
        for number, turn in enumerate(turns, 1):
            say(f"aiperf, run {number} of {len(turns)} ...")
            rows.append(row(turn, _run(aiperf, url, model, turn)))
    return {
        "machine": describe_machine(),
        "model": model_name(model),
        "servers": servers if endpoint is None else None,
        "runs": rows,
        "wrong": [f"run {i}: {why}" for i, row in enumerate(rows, 1) for why in disagreements(row)],
    }


@contextmanager
def _served(
    endpoint: str | None,
    model: Path,
    servers: int,
    redundancy: int,
    transport: str,
    say: Callable[[str], None],
) -> Iterator[str]:
    if endpoint is not None:
        yield endpoint
        return
    say("starting the cluster ...")
    settings = load_config(attention_client={"transport": transport, "port": 0})
    with LocalCluster(model, servers=servers, redundancy=redundancy, config=settings) as cluster:
        yield cluster.endpoint


def _run(aiperf: Path, endpoint: str, model: Path, asked: Asked) -> Run:
    """Run aiperf once and read its results. Raises EaasError with the end of its log."""
    # Offline, aiperf mistakes a local directory for a name on the hub.
    environment = {name: value for name, value in os.environ.items() if "OFFLINE" not in name}
    with tempfile.TemporaryDirectory(prefix="eaas-aiperf-") as directory:
        out, log = Path(directory) / "out", Path(directory) / "log"
        with log.open("wb") as sink:
            process = subprocess.Popen(
                command(aiperf.absolute(), endpoint, model, asked, out),
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=directory,
                process_group=0,
            )
            try:
                status = process.wait(_RUN_S)
            except subprocess.TimeoutExpired:
                raise EaasError(f"aiperf was not done within {_RUN_S:.0f} s") from None
            finally:
                if process.poll() is None:  # aiperf has child processes
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        if status:
            last = "\n".join(log.read_text(errors="replace").splitlines()[-_LINES:])
            raise EaasError(f"aiperf ended with status {status}:\n{last}")
        return read_run(out)
