"""Runs cells in worker processes, which exchange lines of JSON with this one."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from eaas.errors import ConfigError, EaasError
from simulator.caps.cell import run_cell

__all__ = ["run_cells"]

Cell = dict[str, Any]


def run_cells(
    cells: Sequence[Cell], processes: int, done: Callable[[], None]
) -> list[dict[str, Any]]:
    """The results of cells, in their order.

    Args:
        cells: Arguments of `run_cell`.
        processes: Cells that run at a time; with one they run in this process.
        done: Called after each, from any thread.

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
    with _Workers() as workers, ThreadPoolExecutor(processes) as threads:

        def run(cell: Cell) -> dict[str, Any]:
            answer = workers.ask(cell)
            done()
            return answer

        futures = [threads.submit(run, cell) for cell in cells]
        try:
            return [future.result() for future in futures]
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            workers.kill()
            raise


class _Workers:
    """One worker process per calling thread."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._all: list[subprocess.Popen[str]] = []
        self._guard = threading.Lock()
        self._killed = False

    def __enter__(self) -> _Workers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._all:
            # A worker ends with its input.
            process.communicate()

    def kill(self) -> None:
        """Kill all workers."""
        with self._guard:
            self._killed = True
            for process in self._all:
                process.kill()

    def ask(self, cell: Cell) -> dict[str, Any]:
        """Run a cell in this thread's process."""
        process = self._mine()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(cell) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            line = ""
        else:
            line = process.stdout.readline()
        if not line:
            raise EaasError(f"a worker process of the simulation ended (status {process.wait()})")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ConfigError(answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    def _mine(self) -> subprocess.Popen[str]:
        process: subprocess.Popen[str] | None = getattr(self._own, "process", None)
        if process is None:
            with self._guard:
                if self._killed:
                    raise EaasError("the simulation was stopped")
                process = subprocess.Popen(
                    [sys.executable, "-m", "simulator.caps.worker"],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                    # Only the parent gets Ctrl-C; it then ends its workers.
                    process_group=0,
                )
                self._all.append(process)
            self._own.process = process
        return process
