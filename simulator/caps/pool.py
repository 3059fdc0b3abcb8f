"""Runs the cells of a simulated comparison of batch-selection strategies in worker processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from eaas.errors import EaasError
from simulator.caps.cell import run_cell

__all__ = ["run_cells"]


def run_cells(
    cells: Sequence[dict[str, Any]], processes: int, done: Callable[[], None]
) -> list[dict[str, Any]]:
    """Run cells in parallel; return their results in the order of the cells.

    Args:
        cells: Arguments of `run_cell`.
        processes: Number of cells that run at a time; with 1 they run in this process.
        done: Called after each cell.

    Raises:
        ConfigError: See `run_cell`.
        EaasError: A worker process ended.
    """
    processes = min(processes, len(cells))
    if processes <= 1:
        results = []
        for cell in cells:
            results.append(run_cell(**cell))
            done()
        return results
    # Workers are spawned, because a fork would copy the threads' locks of this process.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, context, initializer=_end_with_parent)
    try:
        futures = [pool.submit(run_cell, **cell) for cell in cells]
        for future in as_completed(futures):
            future.result()
            done()
        return [future.result() for future in futures]
    except BrokenProcessPool as error:
        raise EaasError("a worker process of the simulation ended") from error
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """In each worker: leave Ctrl-C to the parent, and exit when it dies: a killed one stops no worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
