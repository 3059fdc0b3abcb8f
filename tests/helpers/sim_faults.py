"""The faults of a simulated cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eaas.types import Role
from monitor.store.kept import Kept
from sim_balancer import BalancerProcess
from sim_client import ClientProcess
from sim_monitor import MonitorProcess
from sim_process import BREAK_S, Process
from sim_server import ServerProcess


def node_of(process: Process) -> int:
    """Number of the node on which a process runs: two servers share one, with the monitor or the balancer."""
    if isinstance(process, ServerProcess):
        return int(process.id.removeprefix("s")) // 2
    return int(process.role is Role.BALANCER)


class Faults:
    """Process starts, stops, deaths, and cuts; a part of `Simulation`."""

    def start(self, kind: type[Process], name: str, role: Role, *arguments: Any) -> None:
        self._pids += 1
        # A process started by hand knows of no end.
        ended_pids = self.ended.get(name, ()) if self.dice.random() < 0.5 else ()
        process = kind(self, name, role, self._pids, ended_pids)
        self.processes = [p for p in self.processes if p.alive] + [process]
        process.start(*arguments)  # type: ignore[attr-defined]

    def start_server(self, name: str) -> None:
        self.start(ServerProcess, name, Role.EXPERT_SERVER)

    def start_monitor(self) -> None:
        events = sorted(self.kept.values(), key=lambda event: event.revision)
        kept = None
        if events:
            kept = Kept(1, events[-1].revision, 0, tuple(events)).without_monitors()
        self.start(MonitorProcess, "monitor", Role.MONITOR, kept)

    def start_balancer(self) -> None:
        wanted = self.wanted if self.dice.random() < 0.7 else None
        self.start(BalancerProcess, "balancer", Role.BALANCER, wanted)

    def spring(self, server: ServerProcess) -> None:
        """A request has just arrived at a server."""
        trap, self.trap = self.trap, ""
        if trap and self.in_faults:
            act, lasts_s = self.kill if trap == "kill" else self.stop, self.dice.uniform(0.01, 3.0)
            self.agenda.at(self.now, lambda: act(server, lasts_s) if server.alive else None)

    def stop(self, process: Process, lasts_s: float) -> None:
        self.say(f"stop {process.id} for {lasts_s:.2f} s")
        process.stopped_until = process.disturbed_at = self.now + lasts_s

    def kill(self, process: Process, again_s: float) -> None:
        """Kill a process and start it again later, unless another one has its name."""
        self.say(f"kill {process.id}({process.pid})")
        process.alive = False
        self.ended[process.id] = (*process.ended_pids, process.pid)
        again: dict[Role, Callable[[], None]] = {
            Role.EXPERT_SERVER: lambda: self.start_server(process.id),
            Role.MONITOR: self.start_monitor,
            Role.BALANCER: self.start_balancer,
        }
        self.down[process.id] = again[process.role]
        self.agenda.at(self.now + again_s, lambda: self.start_again(process.id))
        if isinstance(process, ServerProcess):
            for stream in tuple(process.streams.values()):
                stream.break_soon("killed")

    def start_again(self, name: str) -> None:
        start = self.down.pop(name, None)
        if start is not None and self.peer(name) is None:
            start()

    def strike(self) -> None:
        """Cause one fault."""
        dice, live = self.dice, [p for p in self.processes if p.alive]
        process = dice.choice(live)
        lasts_s = dice.choice([dice.uniform(0.01, 0.5), dice.uniform(0.5, 3.0)])
        faults = (
            *("kill", "node", "stop", "slow", "cut", "twin"),
            *(2 * ("propose", "trap")),
            "propose",
        )
        fault = dice.choice(faults)
        if fault == "kill" and not isinstance(process, ClientProcess):
            self.kill(process, lasts_s)
        elif fault == "node":
            node = node_of(process)
            self.say(f"lose node {node}")
            for other in live:
                if node_of(other) == node and not isinstance(other, ClientProcess):
                    self.kill(other, lasts_s)
        elif fault == "stop":
            self.stop(process, lasts_s)
        elif fault == "trap":
            self.trap = dice.choice(("kill", "stop"))
        elif fault == "slow" and isinstance(process, ServerProcess):
            process.slow = dice.choice([1.0, 5.0, 100.0])
        elif fault == "cut":
            other = dice.choice(live)
            pair = frozenset((process.host, other.host))
            if len(pair) == 2:
                self.say(f"cut {sorted(pair)} for {lasts_s:.2f} s")
                self.cuts[pair] = self.last_cut[pair] = self.now + lasts_s
                if "monitor" in pair:
                    process.disturbed_at = other.disturbed_at = self.now + lasts_s
                for server in live:
                    if isinstance(server, ServerProcess) and server.host in pair:
                        for stream in tuple(server.streams.values()):
                            if stream.client.host in pair:
                                at = self.now + dice.uniform(*BREAK_S)
                                self.agenda.at(at, lambda s=stream: s.break_soon("cut"))
        elif fault == "twin":
            # An unreachable balancer is mistaken for dead, and another one is started.
            balancer = self.peer("balancer")
            if balancer is not None:
                self.say("another balancer")
                balancer.disturbed_at = self.now
                self.start_balancer()
                self.agenda.at(
                    self.now + lasts_s, lambda: self.kill(balancer, 0.0) if balancer.alive else None
                )
        elif fault == "propose":
            balancer = self.peer("balancer")
            if isinstance(balancer, BalancerProcess):
                balancer.propose_any()

    def mend(self) -> None:
        """End the faults: slow servers recover, and killed processes start again."""
        for process in self.processes:
            if isinstance(process, ServerProcess):
                process.slow = 1.0
            process.stopped_until = min(process.stopped_until, self.now)
        self.cuts.clear()
        for name in tuple(self.down):
            self.start_again(name)
