"""`eaas bench serve`, in the launcher: a local cluster against one process, in alternating rounds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eaas.config import load_config
from eaas.cores import usable_cores
from eaas.hub_cache import model_name
from eaas_cli.bench.load import Workload, compare
from eaas_cli.bench.machine import describe_machine
from eaas_cli.console import print_figures, print_rows
from eaas_cli.local import LocalCluster
from eaas_cli.local.fork_server import ForkServer
from eaas_cli.local.interrupt import Interrupt
from eaas_cli.local.process import ChildProcess, stop_all, wait_ready

__all__ = ["BASELINES", "bench_serve", "print_serve", "single_process", "with_fork_server"]

# Implementations of the experts in the single process.
BASELINES = ("transformers", "kernels")

_SINGLE = "single process"
_START_S = 180.0


def bench_serve(
    model: Path,
    *,
    servers: int,
    redundancy: int,
    transport: str,
    workload: Workload,
    rounds: int,
    baseline: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure a cluster and one process that serves the same model, in alternating rounds.

    Args:
        workload: Sent to each in every round.
        rounds: Measured rounds, after one warm-up round.
        baseline: One of BASELINES. "transformers": plain transformers. "kernels": the servers' kernels on all
            cores, so that the ratio is the cost of the split alone.

    Returns:
        The document of `eaas bench serve --json`; for its `rows` see `compare`.

    Raises:
        EaasError: A process did not start, or a request failed.
    """
    settings = load_config(attention_client={"transport": transport}, frontend={"port": 0})
    cores = usable_cores()
    say("starting the cluster ...")
    with LocalCluster(model, servers=servers, redundancy=redundancy, config=settings) as cluster:
        say("starting the single process ...")
        with single_process(model, baseline, cores, cluster.fork_server) as single:
            urls = {"cluster": cluster.endpoint, _SINGLE: str(single.address)}
            rows = compare(urls, workload, rounds, _SINGLE, say)
    return {
        "machine": describe_machine(),
        "model": model_name(model),
        "servers": servers,
        "redundancy": redundancy,
        "transport": transport,
        "baseline": {"experts": baseline, "implementation": single.kernel, "threads": cores},
        "workload": vars(workload),
        "rounds": rounds,
        "rows": rows,
    }


@contextmanager
def with_fork_server(
    modules: Sequence[str],
    fork_server: ForkServer | None = None,
    interrupt: Interrupt | None = None,
) -> Iterator[ForkServer]:
    """Yield a fork server that has finished its imports, so that they do not disturb a measurement.

    Args:
        fork_server: Use this one instead, and keep it running.

    Raises:
        EaasError: The fork server did not start.
        Interrupted: A signal came.
    """
    if fork_server is not None:
        yield fork_server
        return
    own = ForkServer(modules)
    try:
        wait_ready([own], _START_S, interrupt)
        yield own
    finally:
        own.end()


@contextmanager
def single_process(
    model: Path,
    experts: str,
    threads: int,
    fork_server: ForkServer,
    interrupt: Interrupt | None = None,
) -> Iterator[ChildProcess]:
    """Run one process that serves a model without servers for the block. `experts`: one of BASELINES."""
    single = ChildProcess(
        "single-process",
        (str(model.resolve()), experts, str(threads)),
        None,
        module="eaas_cli.bench.baseline",
        fork_server=fork_server,
    )
    try:
        wait_ready([single], _START_S, interrupt)
        yield single
    finally:
        stop_all([single])


def print_serve(document: dict[str, Any]) -> None:
    """Print the report of `eaas bench serve`: a cluster next to one process."""
    print_rows(document["rows"])
    print_figures({"baseline": document["baseline"]})
