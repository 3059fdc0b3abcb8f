"""A whole cluster in simulated time: the live code, with a seeded clock and network.

Real: the clients' layer calls with all their parts (attempts, server health, hedging, budgets, ejections),
their connections, slots and placement switch; the servers' slot table, loop with its compiled verbs, and
placement calls; the gRPC transport's frames, both ends; the monitor's registry and detector; the members'
view of it; the balancer's planner. Simulated: the clock, the network, processes, and the threads that connect
these (`eaas.membership.session`, `balancer.rollout`, `attention_client.cluster`), each a few lines here.

A layer call waits as it does live, on a greenlet that the agenda resumes. A server's expert e multiplies a
token by e + 1, so every answer is known exactly.

Network faults: delays; control calls that are lost or duplicated; frames that are duplicated, late or lost
(then the stream breaks some time later); cuts between two hosts. Process faults: kills with restarts, and
stops. The wall clock jumps all the time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from prometheus_client import CollectorRegistry

from attention_client.telemetry.metrics import ClientMetrics
from eaas.membership.cluster_view import RETURN_GRACE_S
from eaas.types import Placement, Role
from sim_checks import Checks
from sim_client import ClientProcess
from sim_clock import Agenda, Violation, demand, jumping_wall_clock
from sim_faults import Faults
from sim_network import Network, Weather
from sim_process import CALL_S, Process

__all__ = ["Simulation", "Violation"]

# After the faults, a restarted monitor reserves unheard members' ids for the grace time. Only then can a new
# incarnation register and load. Then calls are observed for a while.
REST_S = RETURN_GRACE_S + 1.5 + 2.0 + CALL_S


class Simulation(Faults, Checks, Network):
    """Runs one seed. `run` raises Violation.

    Args:
        seed: Seeds all random draws.
        fault_s: Seconds with faults.
        rest_s: Seconds after them, in which the cluster must recover.

    Attributes:
        trace: One line per event.
        right, failed: Number of layer calls by outcome.
    """

    _metrics: ClassVar[list[ClientMetrics]] = []

    def __init__(self, seed: int, fault_s: float = 5.0, rest_s: float = REST_S) -> None:
        self.dice = random.Random(seed)
        self.agenda = Agenda()
        self.fault_s, self.rest_s = fault_s, rest_s
        self.trace: list[str] = []
        self.servers, self.clients = self.dice.randint(2, 4), self.dice.randint(1, 2)
        self.weather = Weather(
            self.dice.choice([0.0005, 0.002, 0.02]),
            self.dice.choice([0.0, 0.0, 0.02, 0.1]),
            self.dice.choice([0.0, 0.05, 0.2]),
        )
        # Losses can delay anything, so failed calls are then no violation.
        self.is_lossy = self.weather.lost > 0
        self.processes: list[Process] = []
        self.lives: dict[tuple[str, int], Process] = {}
        self.kept: dict[str, Any] = {}
        self.wanted: Placement | None = None
        self.cuts: dict[frozenset[str], float] = {}
        self.last_cut: dict[frozenset[str], float] = {}
        self.epochs: dict[int, bytes] = {}
        self.published: dict[int, tuple[float, Any]] = {}
        # Fault for the server that gets the next request.
        self.trap = ""
        self.calling = self.in_faults = True
        self.right = self.failed = self.open_calls = 0
        self._pids = 0
        self.ended: dict[str, tuple[int, ...]] = {}
        # Killed processes to start again, by id.
        self.down: dict[str, Callable[[], None]] = {}
        self._streams_until: dict[tuple[Process, Process], float] = {}

    @property
    def now(self) -> float:
        return self.agenda.now

    def __str__(self) -> str:
        return "\n".join(self.trace)

    def say(self, what: str) -> None:
        self.trace.append(f"{self.now:9.4f} {what}")

    def metrics(self) -> ClientMetrics:
        # Registries are slow to create, and their counts are not checked here.
        if not self._metrics:
            self._metrics.append(ClientMetrics(CollectorRegistry()))
        return self._metrics[0]

    def run(self) -> Simulation:
        self.start_monitor()
        for number in range(self.servers):
            self.start_server(f"s{number}")
        self.start_balancer()
        for number in range(self.clients):
            self.start(ClientProcess, f"c{number}", Role.ATTENTION_CLIENT)
        for client in self.processes:
            if isinstance(client, ClientProcess):
                client.call_soon(0.5)
        begin = self.now
        for _ in range(self.dice.randint(3, 9)):
            self.agenda.at(begin + self.dice.uniform(0.3, self.fault_s), self.strike)
        with jumping_wall_clock(self.dice.random()), torch.inference_mode():
            self.agenda.run_until(begin + self.fault_s)
            self.in_faults = False
            self.mend()
            self.weather = Weather()
            self.agenda.run_until(begin + self.fault_s + self.rest_s - CALL_S - 2.0)
            failed, right = self.failed, self.right
            self.agenda.run_until(self.now + 1.0)
            demand(self.failed == failed, "calls fail though all is well")
            demand(self.right > right, "no call ends though all is well")
            self.calling = False
            self.agenda.run_until(self.now + CALL_S + 1.0)
        self.check_end()
        return self
