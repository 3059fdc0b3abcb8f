"""A cluster whose servers fail and return in simulated time, under the live balancer's planner.

Real: the planner with its layouts, epochs and calls, and the node names that keep replicas apart. Simulated:
time, the monitor's verdicts (DEAD a lease after the end), the servers' loads and the clients' reports.

    servers end --lease--> DEAD --grace--> planner: a placement without them --load--> published --> retired
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from balancer.planner.actions import Action, Prepare, Publish, Retire
from balancer.planner.layout import Layout, Settings
from balancer.planner.planner import Planner
from eaas.types import Member, MemberState, ModelShape, Placement, Role, ServerReach

__all__ = ["Cluster", "Sizes", "Timeline", "point"]

# A client takes a placement at once, and reports it with its next heartbeat; so does a server its state.
_REPORT_S = 0.9
_CALL_S = 0.005
_SERVING, _DRAINING = MemberState.SERVING, MemberState.DRAINING


@dataclass(frozen=True)
class Sizes:
    """The size of a cluster, and its times.

    Attributes:
        servers, nodes, racks: Servers are dealt evenly to nodes, and nodes to racks.
        names_racks: Whether servers say which rack they are in (`RACK/NODE`), so that the planner knows.
        layers, experts: Of the model.
        redundancy: Replicas of each expert.
        expert_bytes: Bytes of one expert.
        load_bytes_per_s: Rate at which a server loads experts.
        restart_s: From a server's end until its next process registers.
        skew: Standard deviation of the logarithm of experts' loads.
        lease_s, grace_s: `monitor.lease_s` and `balancer.dead_grace_s`.
    """

    servers: int
    nodes: int
    racks: int = 1
    names_racks: bool = True
    clients: int = 0
    layers: int = 4
    experts: int = 256
    redundancy: int = 2
    expert_bytes: int = 44_000_000
    load_bytes_per_s: int = 1_000_000_000
    restart_s: float = 10.0
    skew: float = 1.0
    lease_s: float = 2.0
    grace_s: float = 30.0


class Cluster:
    """A serving cluster: every server has its share of the first placement.

    Attributes:
        now: Simulated seconds.
        timeline: What clients found since `begin`.
        first_planning_s: Processor seconds of the planner for the first placement.
        planning_s: Processor seconds of the planner since `begin`.
        longest_s: Longest of these at once: the planner answers nothing meanwhile.
        loads: Replicas that servers have loaded since `begin`.
    """

    def __init__(self, sizes: Sizes, seed: int = 0) -> None:
        self.sizes = sizes
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        dice = np.random.default_rng(seed)
        loads_LE = dice.lognormal(0, sizes.skew, (sizes.layers, sizes.experts))
        self._load_LE = loads_LE.astype(np.float32)
        names = tuple(f"l{n}" for n in range(sizes.layers))
        shape = ModelShape("simulated", sizes.experts, 1, 1, names, "bfloat16", "0" * 64)
        self.servers = tuple(f"server-{n:05}" for n in range(sizes.servers))
        self._node = {s: n * sizes.nodes // sizes.servers for n, s in enumerate(self.servers)}
        self._members: dict[str, Member] = {
            s: self._member(s, n, shape) for n, s in enumerate(self.servers)
        }
        self._live = set(self.servers)
        reach = tuple(ServerReach(s, 1) for s in self.servers)
        for n in range(sizes.clients):
            client = Member(
                f"client-{n:05}", Role.ATTENTION_CLIENT, 1, f"c{n}", f"192.0.2.2:{n}", _SERVING
            )
            self._members[client.id] = replace(client, incarnation=1, model=shape, reach=reach)
        self._planner = Planner(
            sizes.servers, Layout(Settings(redundancy=sizes.redundancy)), sizes.grace_s
        )
        self._held: dict[str, frozenset[tuple[int, int]]] = dict.fromkeys(self.servers, frozenset())
        self.placement: Placement | None = None
        self.begin()
        self._observe()
        self.run(600.0)
        self.first_planning_s = self.planning_s
        self.begin()

    def _member(self, server: str, number: int, shape: ModelShape) -> Member:
        node = self._node[server]
        name = f"node{node:05}"
        if self.sizes.names_racks:
            name = f"rack{node * self.sizes.racks // self.sizes.nodes:03}/{name}"
        return Member(
            id=server,
            role=Role.EXPERT_SERVER,
            pid=1,
            host=name,
            address=f"192.0.2.1:{number}",
            state=MemberState.JOINING,
            incarnation=1,
            model=shape,
            node=name,
        )

    # -- who fails together -----------------------------------------------------------------------

    def on_node(self, node: int) -> list[str]:
        """Return the servers of a node."""
        return [s for s in self.servers if self._node[s] == node]

    def in_rack(self, rack: int) -> list[str]:
        """Return the servers of a rack, named or not."""
        racks, nodes = self.sizes.racks, self.sizes.nodes
        return [s for s in self.servers if self._node[s] * racks // nodes == rack]

    # -- what happens -----------------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a timeline at the present, and count anew."""
        self._began = self.now
        self.timeline = Timeline()
        self.planning_s = self.longest_s = 0.0
        self.loads = 0
        self._note()

    def kill(self, servers: Collection[str]) -> None:
        """End servers at once. The monitor marks them DEAD a lease later."""
        self._live.difference_update(servers)
        self._note()
        self._after(self.sizes.lease_s, lambda: self._report(servers, state=MemberState.DEAD))

    def drain(self, servers: Collection[str]) -> None:
        """Tell servers to leave: they end once the placement has no experts for them."""
        self._report(servers, state=MemberState.DRAINING)

    def start(self, servers: Iterable[str]) -> None:
        """Start new processes of ended servers, which hold nothing; they register after `restart_s`."""
        names = tuple(servers)

        def register() -> None:
            for s in names:
                was = self._members[s]
                self._held[s] = frozenset()
                self._members[s] = replace(
                    was,
                    state=MemberState.JOINING,
                    incarnation=was.incarnation + 1,
                    pid=was.pid + 1,
                    epoch=0,
                )
            # Clients have connected to them by then.
            self._connect()
            self._observe()

        self._after(self.sizes.restart_s, register)

    def run(self, seconds: float) -> None:
        """Let simulated time pass."""
        until = self.now + seconds
        while True:
            times = [at for at, _, _ in self._events[:1]]
            if (wake := self._planner.wake_at(self.now)) is not None:
                times.append(wake)
            at = min(times, default=until + 1)
            if at > until:
                self.now = until
                return
            self.now = max(self.now, at)
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            # As `Rollout`: one tick for all that has arrived.
            self._tick()

    @property
    def is_at_rest(self) -> bool:
        """Whether servers hold the placement and nothing else."""
        return self._planner.is_at_rest

    @property
    def elapsed_s(self) -> float:
        """Simulated seconds since `begin`."""
        return self.now - self._began

    def serves(self, servers: Collection[str]) -> bool:
        """Whether all of these answer, with all that the placement gives them."""
        return self._live.issuperset(servers)

    def left(self) -> list[str]:
        """Return the servers that drain and have no experts any more; they end now."""
        assert self.placement is not None
        leaving = [s for s, m in self._members.items() if m.state is MemberState.DRAINING]
        gone = [s for s in leaving if s not in self.placement.servers]
        self._live.difference_update(gone)
        if gone:
            self._report(gone, state=MemberState.LEFT)
        return gone

    # -- the planner ------------------------------------------------------------------------------

    def _after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._numbers), what))

    def _report(self, servers: Iterable[str], **changes: object) -> None:
        for s in servers:
            self._members[s] = replace(self._members[s], **changes)  # type: ignore[arg-type]
        self._observe()

    def _connect(self) -> None:
        reach = tuple(ServerReach(s, self._members[s].incarnation) for s in self.servers)
        for name, member in self._members.items():
            if member.role is Role.ATTENTION_CLIENT:
                self._members[name] = replace(member, reach=reach)

    def _timed(self, work: Callable[[], list[Action]]) -> None:
        began = time.process_time()
        actions = work()
        took_s = time.process_time() - began
        self.planning_s += took_s
        self.longest_s = max(self.longest_s, took_s)
        for action in actions:
            if isinstance(action, Prepare):
                self._prepare(action)
            elif isinstance(action, Publish):
                self._publish(action.placement)
            elif isinstance(action, Retire):
                self._after(_CALL_S, lambda call=action: self._retired(call))  # type: ignore[misc]

    def _observe(self) -> None:
        self._timed(lambda: self._planner.observe(dict(self._members), self.now))

    def _tick(self) -> None:
        self._timed(lambda: self._planner.tick(self.now))

    def _prepare(self, call: Prepare) -> None:
        place = call.placement.servers.index(call.server_id)
        share = _places(call.placement.holds_LSE[:, place])
        new = share - self._held[call.server_id]
        process = self._members[call.server_id].process

        def done() -> None:
            if self._members[call.server_id].process == process:
                self.loads += len(new)
                self._held[call.server_id] |= share
                self._planner.succeeded(call)
                if call.placement is self.placement:
                    self._serves_again(call)

        load_s = len(new) * self.sizes.expert_bytes / self.sizes.load_bytes_per_s
        self._after(_CALL_S + load_s, done)

    def _serves_again(self, call: Prepare) -> None:
        """A server that returned has its share of the placement that clients follow."""
        self._live.add(call.server_id)
        self._members[call.server_id] = replace(
            self._members[call.server_id], state=_SERVING, epoch=call.placement.epoch
        )
        self._note()
        self._observe()

    def _publish(self, placement: Placement) -> None:
        first, self.placement = self.placement is None, placement
        alive = {
            s
            for s in placement.servers
            if not self._members[s].state.is_gone and self._members[s].state is not _DRAINING
        }
        self._live |= alive
        if not first:
            self._note()

        def reported() -> None:
            for name, m in self._members.items():
                if name in alive or m.role is Role.ATTENTION_CLIENT:
                    self._members[name] = replace(m, state=_SERVING, epoch=placement.epoch)
            self._observe()

        self._after(_REPORT_S, reported)

    def _retired(self, call: Retire) -> None:
        servers = call.placement.servers
        if call.server_id in servers:
            place = servers.index(call.server_id)
            self._held[call.server_id] = _places(call.placement.holds_LSE[:, place])
        self._planner.succeeded(call)

    def _note(self) -> None:
        if self.placement is not None:
            seconds = self.now - self._began
            self.timeline.points.append(point(seconds, self.placement, self._live, self._load_LE))


def _places(holds_LE: npt.NDArray[np.bool_]) -> frozenset[tuple[int, int]]:
    return frozenset((layer, expert) for layer, expert in np.argwhere(holds_LE).tolist())


@dataclass(frozen=True)
class Point:
    """The cluster from one change to the next.

    Attributes:
        at_s: Simulated seconds since the first failure.
        uncovered: Share of the experts (of all layers) that no live server holds.
        single: Share of the experts that exactly one live server holds.
        imbalance: Load of the busiest live server over the mean of the live ones, mean over the layers (PAR).
    """

    at_s: float
    uncovered: float
    single: float
    imbalance: float


@dataclass
class Timeline:
    """The points of one failure, in order."""

    points: list[Point] = field(default_factory=list)

    def most(self, name: str) -> float:
        """Return the largest value of an attribute of the points."""
        found: float = max(getattr(p, name) for p in self.points)
        return found

    def zero_since_s(self, *names: str) -> float | None:
        """Return since when these attributes are 0 until the end; None: they are not."""
        broken = [i for i, p in enumerate(self.points) if any(getattr(p, name) for name in names)]
        if not broken:
            return 0.0
        return None if broken[-1] == len(self.points) - 1 else self.points[broken[-1] + 1].at_s


def point(
    at_s: float, placement: Placement, live: Collection[str], load_LE: npt.NDArray[np.float32]
) -> Point:
    """Measure a placement, of whose servers some live: clients split a lost replica's load over the others.

    Args:
        at_s: Simulated seconds.
        placement: What clients follow.
        live: Servers that answer, with all that the placement gives them.
        load_LE: Tokens of each expert.
    """
    live_S = np.array([s in live for s in placement.servers], np.bool_)
    holds_LSE = placement.holds_LSE & live_S[None, :, None]
    replicas_LE = holds_LSE.sum(axis=1)
    par = []
    for layer, holds_SE in enumerate(holds_LSE):
        share_SE = np.where(holds_SE, placement.shares_LSE[layer], np.float32(0))
        per_share_E = load_LE[layer] / np.maximum(share_SE.sum(axis=0), np.float32(1e-9))
        load_S = (share_SE @ np.where(replicas_LE[layer] > 0, per_share_E, 0))[live_S]
        par.append(float(load_S.max() / load_S.mean()) if load_S.any() else 1.0)
    return Point(
        at_s,
        float((replicas_LE == 0).mean()),
        float((replicas_LE == 1).mean()),
        float(np.mean(par)),
    )
