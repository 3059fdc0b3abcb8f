"""A whole cluster in simulated time: the code that runs live, on a clock and a network that a seed draws.

Real: the layer calls of clients with all that belongs to them (attempts, standing, races, budgets,
ejections), their connections, slots and placement switch; the servers' slot table, admission, loop, replies
and placement calls; the cable's frames, both ends; the monitor's registry and detector; the members' view of
it; the balancer's planner. Simulated: the clock, the network, processes, and the threads that tie these
together (`eaas.session`, `balancer.rollout`, `attention_client.cluster`), each a few lines here.

A layer call waits as it does live; what it waits with is a greenlet that the agenda goes on with. A server's
expert e multiplies a token by e + 1, so that every answer is known exactly.

What the network does: delays; control calls whose request or answer is lost, or that come twice; frames of a
cable that come twice, late, or never (then the stream breaks some time later); cuts between two hosts. What
processes do: they are killed and started again, or stop for a while. The wall clock jumps all the time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from prometheus_client import CollectorRegistry

from attention_client.metrics import ClientMetrics
from eaas.membership import RETURN_GRACE_S
from eaas.types import Placement, Role
from sim_checks import Checks
from sim_client import ClientProcess
from sim_clock import Agenda, Violation, demand, jumping_wall_clock
from sim_faults import Faults
from sim_network import Network, Weather
from sim_process import CALL_S, Process

__all__ = ["Simulation", "Violation"]

# A monitor that comes back at the end of the faults keeps the place of members that it has not heard of for
# that long; only then a new life of one of them is let in, and loads. Then calls are looked at for a while.
REST_S = RETURN_GRACE_S + 1.5 + 2.0 + CALL_S


class Simulation(Faults, Checks, Network):
    """One seed. `run` raises Violation.

    Args:
        seed: Draws everything.
        fault_s: Seconds in which faults come.
        rest_s: Seconds after them, in which all must become well.

    Attributes:
        trace: A line an event.
        right, failed: Layer calls by their end.
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
        # What is lost can hold anything up: then it is no wonder.
        self.is_lossy = self.weather.lost > 0
        self.processes: list[Process] = []
        self.lives: dict[tuple[str, int], Process] = {}
        self.kept: dict[str, Any] = {}
        self.wanted: Placement | None = None
        self.cuts: dict[frozenset[str], float] = {}
        self.last_cut: dict[frozenset[str], float] = {}
        self.epochs: dict[int, bytes] = {}
        self.published: dict[int, tuple[float, Any]] = {}
        # What is to meet the server that gets the next request.
        self.trap = ""
        self.calling = self.in_faults = True
        self.right = self.failed = self.open_calls = 0
        self._pids = 0
        self.ended: dict[str, tuple[int, ...]] = {}
        # Who is to be started again, by id.
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
        # Registries are slow to make, and what they count is nobody's business here.
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
