"""Measures a server's processor time while idle, and while one client keeps it busy."""

from __future__ import annotations

import time
from typing import Any

from benchmarks.dispatch.caller import Caller, random_request
from benchmarks.dispatch.plan import Plan
from benchmarks.dispatch.server import null_server
from benchmarks.dispatch.turns import Turn, summary, take_turn
from eaas_cli.bench.figures import figure
from eaas_cli.bench.machine import processor_s
from eaas_cli.bench.worker import working
from eaas_cli.local.fork_server import ForkServer

__all__ = ["bench_upkeep"]

# Pause after a connection in which gRPC's threads settle.
_SETTLE_S = 0.5
# Pause that is longer than any server spins.
_PAUSE_S = 0.001


def bench_upkeep(plan: Plan, slots: int, fork_server: ForkServer) -> dict[str, Any]:
    """Measure a server that computes nothing; return the document's `server`."""
    transport, hidden, tokens = plan.transports[0], plan.hidden[0], plan.upkeep_tokens
    request = random_request(tokens, hidden, plan.num_experts, plan.top_k)
    with working([null_server(plan, hidden, tokens, slots)], fork_server) as (server,):
        assert server.address is not None
        with Caller(
            server.address,
            transport,
            hidden=hidden,
            num_experts=plan.num_experts,
            top_k=plan.top_k,
            name="client",
            slots=slots,
        ) as caller:

            def exchange() -> None:
                caller.exchange(request)

            take_turn(exchange, 0)
            time.sleep(_SETTLE_S)
            idle = _Watch(server.pid)
            time.sleep(plan.watch_s)
            idle_fraction = idle.fraction()
            busy = _Watch(server.pid)
            done = len(take_turn(exchange, plan.watch_s))
            busy_fraction = busy.fraction()
            paused = [
                Turn.of(take_turn(exchange, plan.turn_s, pause_s=_PAUSE_S))
                for _ in range(plan.rounds)
            ]
            return {
                "transport": transport,
                "hidden": hidden,
                "tokens": tokens,
                "idle_cpu_fraction": figure(idle_fraction),
                "busy_cpu_fraction": figure(busy_fraction),
                "exchanges_per_s": figure(done / busy.seconds),
                "paused_exchange_us": summary(paused),
            }


class _Watch:
    """Measures the processor time of a process from now on.

    Attributes:
        seconds: Duration until `fraction` was called.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._began, self._ran_s = time.monotonic(), processor_s(pid)
        self.seconds = 0.0

    def fraction(self) -> float:
        """Processor time from the start until now, as a share of one core."""
        ran_s = processor_s(self._pid) - self._ran_s
        self.seconds = time.monotonic() - self._began
        return ran_s / self.seconds
