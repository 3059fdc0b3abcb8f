"""The measured monitor: `python -m benchmarks.monitor.monitor_process JSON`, with a clock at its event loop.

Its one command is answered with the longest holds of the loop since the last time:

    hold_ms       longest step of the loop: one callback, in which no heartbeat is heard
    hold_cpu_ms   longest step in processor time, without the time in which other processes had the processor
    lag_ms        longest delay of a timer, which is all that was due before it
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from asyncio import events
from typing import Any

from eaas.config import MonitorConfig
from eaas.launcher_pipe import announce, bind_to_launcher
from eaas.log import configure_logging
from eaas.net.grpc_loop import grpc_loop
from eaas_cli.bench.figures import figure
from eaas_cli.bench.worker import commands_from
from monitor.main import run

__all__ = ["LoopClock", "main"]

_PROBE_S = 0.01


class LoopClock:
    """Measures how long the steps of this process's event loops take, and how late a timer is."""

    def __init__(self) -> None:
        self._hold_s = self._hold_cpu_s = self._lag_s = 0.0

    def attach(self) -> None:
        """Time every callback from now on. Every asyncio loop of the process runs them as `Handle._run`."""
        original = events.Handle._run

        def timed(handle: events.Handle) -> None:
            began, cpu = time.perf_counter(), time.thread_time()
            original(handle)
            self._hold_cpu_s = max(self._hold_cpu_s, time.thread_time() - cpu)
            self._hold_s = max(self._hold_s, time.perf_counter() - began)

        events.Handle._run = timed  # type: ignore[method-assign, assignment]

    async def probe(self) -> None:
        """Record the delays of a timer in the running loop, for ever."""
        while True:
            due = time.monotonic() + _PROBE_S
            await asyncio.sleep(_PROBE_S)
            self._lag_s = max(self._lag_s, time.monotonic() - due)

    def take(self) -> dict[str, float]:
        """Return the longest times since the last call, and reset them."""
        found = {
            "hold_ms": figure(1e3 * self._hold_s),
            "hold_cpu_ms": figure(1e3 * self._hold_cpu_s),
            "lag_ms": figure(1e3 * self._lag_s),
        }
        self._hold_s = self._hold_cpu_s = self._lag_s = 0.0
        return found


def main(arguments: str) -> None:
    """Run a monitor with default settings until SIGTERM."""
    bind_to_launcher()
    configure_logging("monitor")
    wanted: dict[str, Any] = json.loads(arguments)
    clock = LoopClock()
    clock.attach()

    def answer() -> None:
        for _, reply in commands_from(wanted["control"]):
            reply(clock.take())

    def ready(address: str) -> None:
        asyncio.run_coroutine_threadsafe(clock.probe(), grpc_loop())
        threading.Thread(target=answer, name="commands", daemon=True).start()
        announce(ready=address)

    run(MonitorConfig(host="127.0.0.1", port=0), ready)


if __name__ == "__main__":
    main(sys.argv[1])
