"""`eaas bench serve`, in the launcher: a local cluster against one process, in alternating rounds."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eaas.config import load_config
from eaas.cores import usable_cores
from eaas.hub_cache import model_name
from eaas_cli.bench.load import LoadResult, Workload, latencies, run_load
from eaas_cli.bench.machine import describe_machine
from eaas_cli.console import print_table
from eaas_cli.local import LocalCluster
from eaas_cli.local.fork_server import CLIENT_MODULES, CONTROL_MODULES, SERVER_MODULES, ForkServer
from eaas_cli.local.interrupt import Interrupt
from eaas_cli.local.process import ChildProcess, stop_all, wait_ready

__all__ = ["BASELINES", "bench_serve", "print_serve", "single_process", "with_fork_server"]

# Implementations of the experts in the single process.
BASELINES = ("transformers", "kernels")

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
    fork_server: ForkServer | None = None,
) -> dict[str, Any]:
    """Measure a cluster and one process that serves the same model, in alternating rounds.

    Args:
        workload: Sent to each in every round.
        rounds: Measured rounds, after one warm-up round.
        baseline: One of BASELINES. "transformers": plain transformers. "kernels": the servers' kernels on all
            cores, so that the ratio is the cost of the split alone.
        fork_server: Forks the processes, and keeps running afterwards. None: the run starts its own.

    Returns:
        The document of `eaas bench serve --json`: figures are medians over the rounds, `ratio` is the median
        of the rounds' ratios.

    Raises:
        EaasError: A process did not start, or a request failed.
    """
    settings = load_config(attention_client={"transport": transport, "port": 0})
    cores = usable_cores()
    cluster_runs: list[LoadResult] = []
    single_runs: list[LoadResult] = []
    say("starting the cluster ...")
    with (
        with_fork_server(CONTROL_MODULES + SERVER_MODULES + CLIENT_MODULES, fork_server) as forks,
        LocalCluster(
            model, servers=servers, redundancy=redundancy, config=settings, fork_server=forks
        ) as cluster,
    ):
        say("starting the single process ...")
        with single_process(model, baseline, cores, forks) as single:
            for number in range(rounds + 1):
                say(f"round {number} of {rounds}" if number else "warming up ...")
                runs = [run_load(url, workload) for url in (cluster.endpoint, str(single.address))]
                if number:
                    cluster_runs.append(runs[0])
                    single_runs.append(runs[1])
    ratios = [
        c.tokens_per_s / s.tokens_per_s for c, s in zip(cluster_runs, single_runs, strict=True)
    ]
    return {
        "machine": describe_machine(),
        "model": model_name(model),
        "servers": servers,
        "redundancy": redundancy,
        "transport": transport,
        "baseline": {
            "experts": baseline,
            "implementation": single.kernel,
            "threads": cores,
        },
        "workload": vars(workload),
        "rounds": rounds,
        "cluster": _median_run(cluster_runs),
        "single_process": _median_run(single_runs),
        "ratio": {"decode_tokens_per_s": round(statistics.median(ratios), 3)},
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


def _median_run(runs: list[LoadResult]) -> dict[str, object]:
    """Combine rounds into one entry: throughput of the median round, latencies over all rounds' tokens."""
    rates = sorted(run.tokens_per_s for run in runs)
    return {"decode_tokens_per_s": round(rates[len(runs) // 2], 2), **latencies(runs)}


def print_serve(document: dict[str, Any]) -> None:
    """Print the report of `eaas bench serve`: a cluster next to one process, and their ratio."""
    rows = [
        (
            name,
            str(document[name]["decode_tokens_per_s"]),
            *(
                f"{document[name][kind][p]:.1f} ms"
                for kind in ("ttft_ms", "itl_ms")
                for p in ("p50", "p99")
            ),
        )
        for name in ("cluster", "single_process")
    ]
    print_table(("", "tokens/s", "TTFT p50", "TTFT p99", "ITL p50", "ITL p99"), rows)
    print(f"cluster / single process: {document['ratio']['decode_tokens_per_s']}")
    baseline = document["baseline"]
    print(
        f"the single process computed experts with {baseline['experts']}: "
        f"{baseline['implementation']}, {baseline['threads']} threads"
    )
