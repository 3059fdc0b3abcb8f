"""A process of a simulated cluster, and its membership as `eaas.membership.session` keeps it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from eaas.membership.cluster_view import MembershipFold
from eaas.rpc.v1 import monitor_pb2
from eaas.types import Member, MemberState, ModelShape, Role

if TYPE_CHECKING:
    from cluster_sim import Simulation
    from sim_monitor import MonitorProcess

LAYERS, EXPERTS, HIDDEN, TOP_K = 2, 6, 2, 2
SHAPE = ModelShape("tiny", EXPERTS, HIDDEN, TOP_K, ("l0", "l1"), "float32", "digest")
FULL = (LAYERS, EXPERTS)
TOKENS, SLOTS, CLIENT_SLOTS = 4, 8, 3
LEASE_S, HEARTBEAT_S = 2.0, 0.9
GRACE_S, ACK_S, HOLD_S = 3.0, 4.0, 3.0
CALL_S, ATTEMPT_S = 3.0, 0.15
# Of a control call without an answer, and before it is tried again.
RPC_S, RETRY_S = 1.0, 0.5
PUSH_S = 1.0
# Until both ends of a stream that lost a frame know it.
BREAK_S = (0.3, 1.5)
RECONNECT_S = 0.25
REDUNDANCY = 2
SUSPECT, DEAD, JOINING, SERVING = (
    MemberState.SUSPECT,
    MemberState.DEAD,
    MemberState.JOINING,
    MemberState.SERVING,
)
USABLE = (JOINING, SERVING, SUSPECT, MemberState.DRAINING)


class Refused(Exception):
    """A control call was refused."""


@dataclass(eq=False)
class Process:
    """One incarnation of a process.

    Attributes:
        ended_pids: Process ids of its predecessors whose ends its parent saw.
        host: Its host: processes of a host are cut off together.
        stopped_until: As after SIGSTOP: nothing of it runs before that.
        disturbed_at: When something last happened to it that excuses what it does.
    """

    sim: Simulation
    id: str
    role: Role
    pid: int
    ended_pids: tuple[int, ...] = ()
    alive: bool = True
    incarnation: int = 0
    stopped_until: float = 0.0
    disturbed_at: float = 0.0
    fold: MembershipFold = field(default_factory=MembershipFold)
    position: tuple[int, int] = (0, 0)
    heard_at: float = 0.0

    @property
    def host(self) -> str:
        return self.id

    def soon(self, delay_s: float, action: Callable[[], None]) -> None:
        """In this process, after a while; not once it is dead, and not while it is stopped."""

        def run() -> None:
            if not self.alive:
                return
            if self.sim.now < self.stopped_until:
                self.sim.agenda.at(self.stopped_until + self.sim.dice.uniform(0, 0.002), run)
                return
            action()

        self.sim.agenda.at(self.sim.now + delay_s, run)

    # -- membership, as `eaas.membership.session` does it ----------------------------------------------------

    def report(self) -> dict[str, Any]:
        return {"state": SERVING}

    def member(self) -> Member:
        told = self.report()
        return Member(
            self.id,
            self.role,
            self.pid,
            "h",
            f"{self.id}:{self.pid}",
            told["state"],
            model=SHAPE,
            experts=told.get("experts", 0),
            epoch=told.get("epoch", 0),
            reach=() if "reach" in told else None,
        )

    def join(self) -> None:
        before = self.incarnation

        def registered(incarnation: int) -> None:
            if before and incarnation != before:
                self.reborn()
            self.incarnation = incarnation
            self.on_members()
            self.beat()

        def take(monitor: MonitorProcess) -> int:
            return monitor.register(self, before)

        self.sim.call(self, "monitor", take, registered, lambda: self.soon(RETRY_S, self.join))

    def reborn(self) -> None:
        """The former incarnation has ended."""

    def beat(self) -> None:
        incarnation, told = self.incarnation, self.report()

        def take(monitor: MonitorProcess) -> bool:
            return monitor.heartbeat(self, incarnation, told)

        def answered(known: bool) -> None:
            self.soon(HEARTBEAT_S, self.beat) if known else self.join()

        self.sim.call(self, "monitor", take, answered, lambda: self.soon(0.0, self.beat))

    def take_members(self, response: monitor_pb2.WatchResponse) -> None:
        self.position = (response.snapshot.life, response.snapshot.revision)
        if self.fold.take(response, self.sim.now):
            self.on_members()

    def on_members(self) -> None:
        """The view changed."""
