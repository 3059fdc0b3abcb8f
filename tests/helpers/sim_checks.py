"""What must hold of a simulated cluster, whatever its faults are."""

from __future__ import annotations

from typing import Any

import numpy as np

from eaas.types import Placement, Role
from sim_balancer import BalancerProcess
from sim_client import ClientProcess
from sim_clock import demand
from sim_monitor import MonitorProcess
from sim_process import ACK_S, FULL, REDUNDANCY, SERVING
from sim_server import ServerProcess


class Checks:
    """Invariants; a part of `Simulation`."""

    def coverages(self) -> dict[ClientProcess, np.ndarray]:
        """Experts that each client would find, by what it follows and what live servers hold."""
        stores = {
            p.id: p.store.holds_LE()
            for p in self.processes
            if isinstance(p, ServerProcess) and p.alive
        }
        found = {}
        for client in self.processes:
            if isinstance(client, ClientProcess) and client.alive and client.followed:
                placement = client.followed[-1][1]
                covered_LE = np.zeros(FULL, dtype=bool)
                for s, name in enumerate(placement.servers):
                    if name in stores:
                        covered_LE |= placement.holds_LSE[:, s] & stores[name]
                found[client] = covered_LE
        return found

    def check_retirement(
        self, server: ServerProcess, epoch: int, before: dict[Any, np.ndarray]
    ) -> None:
        """Until its time is over, no client that the balancer knows loses an expert to a retirement."""
        published_at, balancer = self.published.get(epoch, (-np.inf, None))
        if self.now >= published_at + ACK_S:
            return
        after, known = self.coverages(), balancer.fold.view.members
        for client, covered_LE in before.items():
            member = known.get(client.id)
            incarnation = None if member is None or member.state.is_gone else member.incarnation
            lost = np.argwhere(covered_LE & ~after[client]).tolist()
            if incarnation == client.incarnation:
                demand(not lost, f"{client.id} lost {lost} to a retirement of {server.id}")

    def check_epoch(self, placement: Placement) -> None:
        """There are no two placements of one epoch."""
        said = placement.to_proto().SerializeToString(deterministic=True)
        same = self.epochs.setdefault(placement.epoch, said) == said
        demand(same, f"two placements of epoch {placement.epoch}")

    def check_failure(self, client: ClientProcess, layer: int, experts: Any, began: float) -> None:
        """No error if every expert had a replica on a server that was well all along and known to the client.

        A server refuses a request as a whole, so an expert that is not there takes others of the call along.
        """
        since = began - 1.0
        if client.disturbed_at > since:
            return
        placements = [p for at, p in client.followed if at < self.now]
        first = max((i for i, (at, _) in enumerate(client.followed) if at <= since), default=None)
        if first is None:
            return
        had = {}
        for expert in experts:
            for server in self.processes:
                if not isinstance(server, ServerProcess) or not server.alive:
                    continue
                cut_at = self.last_cut.get(frozenset((client.host, server.host)), 0.0)
                well = max(server.disturbed_at, cut_at) < since - 1.0 and server.slow == 1.0
                held = server.store.since.get((layer, expert), np.inf) < since
                led = all(
                    server.id in p.servers
                    and p.holds_LSE[layer, p.servers.index(server.id), expert]
                    for p in placements[first:]
                )
                if well and held and led and not self.is_lossy:
                    had[expert] = server.id
        demand(len(had) < len(experts), f"{client.id}: no experts {[*experts]}, of {had}")

    def check_end(self) -> None:
        """All requests have ended; servers hold exactly their shares; all members follow the placement."""
        demand(self.open_calls == 0, f"{self.open_calls} calls have no end")
        balancer = self.peer("balancer")
        assert isinstance(balancer, BalancerProcess)
        placement = balancer.published
        demand(placement is not None, "there is no placement")
        live = sorted(p.id for p in self.processes if isinstance(p, ServerProcess) and p.alive)
        demand(sorted(placement.servers) == live, f"placement of {placement.servers}, not {live}")
        replicas = placement.holds_LSE.sum(axis=1)
        demand((replicas >= min(REDUNDANCY, len(live))).all(), "too few replicas")
        for s, name in enumerate(placement.servers):
            held_LE = self.peer(name).store.holds_LE()
            demand(
                (held_LE == placement.holds_LSE[:, s]).all(),
                f"{name} holds more or less than its share",
            )
        for client in self.processes:
            if isinstance(client, ClientProcess) and client.alive:
                demand(client.switch.current is not None, f"{client.id} has no placement")
                epoch = client.switch.current.epoch
                demand(epoch == placement.epoch, f"{client.id} follows {epoch}")
                usable = client.view().usable_S()
                demand(usable.all(), f"{client.id} is not connected to all servers")
        monitor = self.peer("monitor")
        assert isinstance(monitor, MonitorProcess)
        for member in monitor.registry.members(self.now):
            process = self.peer(member.id)
            alive = process is not None and process.incarnation == member.incarnation
            if member.role is not Role.MONITOR and alive:
                demand(member.state is SERVING, f"{member.id} is {member.state.value}")
