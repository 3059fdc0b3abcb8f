"""CPU cores of this process, and how the processes of `eaas up` share them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from eaas import control_groups
from eaas.errors import ConfigError

__all__ = [
    "bind_thread",
    "has_quota",
    "limit_thread_pools",
    "refuse_other_core",
    "server_core",
    "threads_on_any_core",
    "usable_cores",
]


def usable_cores(root: Path = control_groups.ROOT) -> int:
    """Number of CPU cores that `taskset` and the control groups leave this process, rounded down, at least 1.

    Thread counts follow it: more threads than a quota pays for spin against each other.
    """
    cores, quota = len(os.sched_getaffinity(0)), control_groups.core_quota(root)
    return cores if quota is None else max(1, min(cores, int(quota)))


def has_quota() -> bool:
    """Whether this process has less processor time than cores."""
    return usable_cores() < len(os.sched_getaffinity(0))


def limit_thread_pools() -> None:
    """Tell OpenMP and OpenBLAS of a quota, before they are imported, because they count the affinity alone.

    A number that the user has set stays.
    """
    if has_quota():
        # OpenBLAS reads it, too.
        os.environ.setdefault("OMP_NUM_THREADS", str(usable_cores()))


def server_core(engine: str, cores: Sequence[int], index: int) -> int | None:
    """Choose the core of an expert server's loop on a machine that also runs the attention client.

    vLLM binds its model to the first of two cores and leaves the other to its HTTP server. The model waits
    while the experts compute, so the first server's loop takes the same core: a switch of threads there costs
    less than waking a halted core. Further servers alternate, and so compute at the same time.

    Args:
        engine: Engine of the attention client.
        cores: Cores of this machine.
        index: Number of the server, from 0.

    Returns:
        None: any core, for another engine or with more cores, where the system spreads the threads.
    """
    if engine != "vllm" or len(cores) != 2:
        return None
    return cores[index % 2]


def refuse_other_core(core: int) -> None:
    """Check the setting `expert_server.core`; -1 means any core.

    Raises:
        ConfigError: This process may not use the core.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if core >= 0 and core not in allowed:
        raise ConfigError(
            f"expert_server.core: {core}: choose one of this machine's cores {allowed}"
        )


def bind_thread(core: int) -> None:
    """Bind the calling thread to a core; threads that it starts later inherit that."""
    os.sched_setaffinity(0, {core})


@contextlib.contextmanager
def threads_on_any_core() -> Iterator[None]:
    """Let threads that start inside the block use all cores of the parent process.

    vLLM binds a worker process to the model's cores. A heartbeat thread that inherits that waits for the
    model's own threads, and the monitor takes the worker for dead on a busy machine.
    """
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()) | bound)
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)
