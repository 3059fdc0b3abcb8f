"""A cluster in which every step of a roll-out can be delayed, lost or cut short; no I/O, no clock."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from balancer.planner.actions import (
    Action,
    Call,
    Complain,
    Complete,
    Inspect,
    Prepare,
    Publish,
    Retire,
)
from balancer.planner.layout import Layout, Settings
from balancer.planner.planner import Phase, Planner
from eaas.types import Member, MemberState, ModelShape, Placement, Role

JOINING, SERVING, DEAD = MemberState.JOINING, MemberState.SERVING, MemberState.DEAD
DRAINING, SUSPECT = MemberState.DRAINING, MemberState.SUSPECT
SHAPE = ModelShape("tiny", 6, 64, 2, ("l0", "l1"), "float32", "digest-a")
FULL = (SHAPE.num_layers, SHAPE.num_experts)
RIGHT_LE = np.arange(1, 1 + FULL[0] * FULL[1], dtype=np.uint64).reshape(FULL)
GRACE_S, ACK_S, LONGEST_UNABLE_S = 30.0, 10.0, 600.0


def server(
    name: str,
    state: MemberState = JOINING,
    incarnation: int = 1,
    model: ModelShape | None = SHAPE,
    epoch: int = 0,
) -> Member:
    role = Role.EXPERT_SERVER
    return Member(
        name, role, 1, "h", f"{name}:1", state, incarnation=incarnation, model=model, epoch=epoch
    )


def client(name: str, epoch: int = 0, state: MemberState = SERVING) -> Member:
    role = Role.ATTENTION_CLIENT
    return Member(name, role, 1, "h", f"{name}:1", state, incarnation=1, model=SHAPE, epoch=epoch)


class World:
    """Servers, clients and the current balancer, which hears of everything at once.

    Attributes:
        stores: Experts that each live server holds, bool (L, E).
        calls: Calls in flight, of the current and of previous balancers.
        follows: The placement that each client follows.
        published: The current balancer's placement; None: none yet.
        remembers: Whether a new balancer gets its predecessor's last candidate.
        unreachable: Live, serving servers that no call of the balancer reaches.
        capacity: Replicas that servers have memory for, by name; unlimited if missing.
        overfull: Servers that were told to hold more.
        copies: Digests that servers read, (L, E): right unless a test damages them.
    """

    def __init__(self, expected: int, redundancy: int) -> None:
        self.expected, self.redundancy = expected, redundancy
        self.now = 1000.0
        self.members: dict[str, Member] = {}
        self.stores: dict[str, np.ndarray] = {}
        self.told: dict[str, int] = {}
        self.unreachable: set[str] = set()
        self.capacity: dict[str, int] = {}
        self.overfull: list[str] = []
        self.copies: dict[str, np.ndarray] = defaultdict(lambda: RIGHT_LE.copy())
        self.vain: list[tuple[Planner, Call]] = []
        self.calls: list[tuple[Planner, Call]] = []
        self.follows: dict[str, Placement] = {}
        self.placements: dict[int, Placement] = {}
        self.loads = self.starts = 0
        self.remembers = False
        self.wanted: Placement | None = None
        self.start_balancer()

    # -- the balancer -----------------------------------------------------------------------------

    def start_balancer(self) -> None:
        """Replace the balancer; calls in flight stay."""
        self.layout = Layout(Settings(redundancy=self.redundancy))
        self.planner = Planner(self.expected, self.layout, GRACE_S, ACK_S)
        if self.remembers and self.wanted is not None:
            self.planner.remember(self.wanted)
        self.published: Placement | None = None
        self.refusals: list[Complain] = []
        self.complaints: list[Complain] = []
        self.completed_epochs: list[int] = []
        before = self.members.get("balancer")
        life = before.incarnation + 1 if before else 1
        self.members["balancer"] = Member(
            "balancer", Role.BALANCER, life, "h", "b:1", SERVING, incarnation=life
        )
        self.notify()

    def notify(self) -> None:
        self.apply(self.planner.observe(dict(self.members), self.now))

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.apply(self.planner.tick(self.now))

    def apply(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Publish):
                placement = action.placement
                assert placement.epoch not in self.placements
                assert placement.epoch > max(self.placements, default=0)
                # With limited memory lost experts may have to wait for free memory.
                assert self.covered(placement).all() or self.capacity, "published what nobody holds"
                assert np.allclose(placement.shares_LSE.sum(axis=1), 1)
                self.placements[placement.epoch] = self.published = placement
            elif isinstance(action, Inspect | Prepare | Retire):
                self.calls.append((self.planner, action))
                if isinstance(action, Prepare):
                    self.wanted = action.placement
            elif isinstance(action, Complain):
                (self.refusals if action.refused else self.complaints).append(action)
            else:
                assert isinstance(action, Complete)
                assert action.placement is self.published
                self.completed_epochs.append(action.placement.epoch)

    def covered(self, placement: Placement) -> np.ndarray:
        """Experts held by a server that a follower of the placement would ask: bool (L, E)."""
        found_LE = np.zeros(FULL, dtype=bool)
        for s, name in enumerate(placement.servers):
            if name in self.stores:
                found_LE |= placement.holds_LSE[:, s] & self.stores[name]
        return found_LE

    # -- servers ----------------------------------------------------------------------------------

    def up(self) -> list[str]:
        return sorted(self.stores)

    def start(self, name: str, incarnation: int | None = None, address: str = "") -> None:
        """Start a process with its own address; its incarnation may be a former one."""
        before = self.members.get(name)
        life = incarnation or (before.incarnation + 1 if before else 1)
        self.starts += 1
        address = address or f"{name}:{self.starts}"
        self.members[name] = replace(
            server(name, incarnation=life),
            address=address,
            memory_bytes=1000 * self.capacity.get(name, 0),
            expert_bytes=1000,
        )
        self.stores[name] = np.zeros(FULL, dtype=bool)
        self.told[name] = 0
        self.notify()

    def die(self, name: str) -> None:
        self.members[name] = replace(self.members[name], state=DEAD)
        del self.stores[name]
        self.unreachable.discard(name)
        self.notify()

    def reconnect(self) -> None:
        """Make all servers reachable, and repeat the calls to them that are still wanted."""
        self.unreachable.clear()
        self.calls += [(p, c) for p, c in self.vain if p is self.planner and p.is_wanted(c)]
        self.vain.clear()

    def drain(self, name: str) -> None:
        self.members[name] = replace(self.members[name], state=DRAINING)
        self.notify()

    def leave_where_empty(self) -> None:
        for name in self.up():
            if self.members[name].state is DRAINING and not self.stores[name].any():
                self.die(name)

    def answer(self, place: int = 0, *, fail: bool = False) -> None:
        """Carry out a call in flight, or let it fail, and tell its balancer if it lives."""
        planner, call = self.calls.pop(place)
        member = self.members[call.server_id]
        lives = call.server_id in self.stores and member.address == call.address
        arrived = lives and call.server_id not in self.unreachable
        holds_LE = self.stores[call.server_id].copy() if arrived else None
        if arrived and fail and isinstance(call, Prepare):
            # It knows the epoch before it has loaded anything.
            self.told[call.server_id] = max(self.told[call.server_id], call.placement.epoch)
        stated_LE, missing, differs = self.compare(call)
        done = arrived and not fail and self.carry_out(call, serve=not missing and not differs)
        if done and differs and self.members[call.server_id].state is JOINING:
            # A useless server ends; the balancer hears of that first.
            self.die(call.server_id)
        self.notify()
        if planner is not self.planner:
            return
        if done and differs:
            self.apply(planner.mismatched(call, self.now, "differs"))
        elif done and missing:
            planner.loaded(call, stated_LE)
            self.apply(planner.tick(self.now))
        elif done:
            told = self.told[call.server_id]
            planner.succeeded(call, holds_LE, told, stated_LE)
            self.apply(planner.tick(self.now))
        else:
            self.apply(planner.failed(call, self.now))
            if planner.is_wanted(call):
                # Retire is repeated for ever to an unreachable server.
                vain = isinstance(call, Retire) and call.server_id in self.unreachable
                (self.vain if vain else self.calls).append((planner, call))

    def compare(self, call: Call) -> tuple[np.ndarray, bool, bool]:
        """A server's digests; whether a call to load lacks some; whether some differ."""
        name = call.server_id
        wanted_LE = self.stores.get(name, np.zeros(FULL, bool))
        if not isinstance(call, Prepare):
            return np.where(wanted_LE, self.copies[name], 0), False, False
        wanted_LE = np.zeros(FULL, bool)
        if name in call.placement.servers:
            wanted_LE = call.placement.holds_LSE[:, call.placement.servers.index(name)]
        known_LE = call.digests_LE if call.digests_LE is not None else np.zeros(FULL, np.uint64)
        differs_LE = (known_LE != 0) & (known_LE != self.copies[name])
        stated_LE = np.where(wanted_LE, self.copies[name], 0)
        missing = bool((wanted_LE & (known_LE == 0)).any())
        return stated_LE, missing, bool((wanted_LE & differs_LE).any())

    def carry_out(self, call: Call, *, serve: bool = True) -> bool:
        """Carry out a call on the server; False: it refuses an older epoch."""
        name = call.server_id
        if isinstance(call, Inspect):
            return True
        if call.placement.epoch < self.told[name]:
            return False
        self.told[name] = call.placement.epoch
        share_LE = np.zeros(FULL, dtype=bool)
        if name in call.placement.servers:
            share_LE = call.placement.holds_LSE[:, call.placement.servers.index(name)]
        state = self.members[name].state
        if isinstance(call, Prepare) and not serve:
            return True
        if isinstance(call, Prepare):
            self.loads += int((share_LE & ~self.stores[name]).sum())
            self.stores[name] |= share_LE
            if self.stores[name].sum() > self.capacity.get(name, share_LE.size):
                self.overfull.append(name)
            state = SERVING if state is JOINING else state
        else:
            before = {c: self.covered(p) for c, p in self.follows.items()}
            self.stores[name] &= share_LE
            for c, covered_LE in before.items():
                lost_LE = covered_LE & ~self.covered(self.follows[c])
                assert not lost_LE.any(), f"{c} lost experts to a retirement"
        self.members[name] = replace(self.members[name], state=state, epoch=self.told[name])
        return True

    # -- clients ----------------------------------------------------------------------------------

    def follow(self, name: str) -> None:
        """Let a client follow the balancer's newest placement and report it."""
        if self.published is not None:
            self.follows[name] = self.published
            self.members[name] = client(name, self.published.epoch)
            self.notify()

    # -- until nothing is left to do --------------------------------------------------------------

    def advance(self, steps: int) -> bool:
        """Answer calls, then let the client follow; False if all was done in fewer steps."""
        for _ in range(steps):
            if self.calls:
                self.answer()
            elif self.follows["c"] is not self.published:
                self.follow("c")
            else:
                return False
        return True

    def answer_all(self) -> None:
        while self.calls:
            self.answer()

    def rest(self, times: int = 3, seconds: float = GRACE_S + 1) -> None:
        """Settle again and again, each time after all graces are over."""
        for _ in range(times):
            self.settle()
            self.wait(seconds)
        self.settle()

    def settle(self) -> None:
        for _ in range(1000):
            if self.calls:
                self.answer()
            else:
                epochs = {p.epoch for p in self.follows.values()}
                self.leave_where_empty()
                for name in tuple(self.follows):
                    self.follow(name)
                if not self.calls and {p.epoch for p in self.follows.values()} == epochs:
                    return
        raise AssertionError("it never ends")

    def assert_settles(self) -> None:
        self.settle()
        self.assert_settled()

    def assert_settled(self) -> None:
        """All that live hold their shares and nothing else, evenly, and everybody follows that."""
        placement = self.published
        assert placement is not None
        assert self.planner.phase is Phase.PUBLISHED
        assert sorted(placement.servers) == sorted(self.up())
        replicas = min(self.redundancy, len(self.stores))
        assert (placement.holds_LSE.sum(axis=1) == replicas).all()
        for s, name in enumerate(placement.servers):
            assert (self.stores[name] == placement.holds_LSE[:, s]).all()
            assert self.members[name].state is SERVING
        assert {p.epoch for p in self.follows.values()} <= {placement.epoch}


def settled(*names: str, redundancy: int = 2, clients: tuple[str, ...] = ("c",)) -> World:
    """A world with a published placement that all follow."""
    world = World(len(names), redundancy)
    for name in names:
        world.start(name)
    world.answer_all()
    for name in clients:
        world.follow(name)
    world.settle()
    world.assert_settled()
    return world


def play(
    world: World,
    rng: random.Random,
    steps: int,
    *,
    names: Sequence[str],
    propose: Callable[[], None] | None = None,
) -> None:
    """Random events in any order; `World` checks that no client loses an expert to the balancer.

    Args:
        world: The cluster.
        rng: Chooses the events.
        steps: Number of events.
        names: The servers.
        propose: Proposes a placement.
    """
    for _ in range(steps):
        if propose is not None and rng.random() < 0.15:
            propose()
            continue
        what, up = rng.random(), world.up()
        staying = [n for n in up if world.members[n].state is not DRAINING]
        if world.calls and what < 0.6:
            world.answer(rng.randrange(len(world.calls)), fail=rng.random() < 0.1)
        elif what < 0.7:
            world.follow(rng.choice(sorted(world.follows)))
        elif what < 0.8:
            if down := [n for n in names if n not in up]:
                world.start(rng.choice(down))
        elif what < 0.87 and len(staying) > 1:
            world.die(rng.choice(up))
        elif what < 0.9 and len(staying) > 1:
            world.drain(rng.choice(staying))
        elif what < 0.92:
            world.unreachable.add(rng.choice(up))
        elif what < 0.93:
            world.reconnect()
        elif what < 0.95:
            world.start_balancer()
        elif what < 0.98:
            world.leave_where_empty()
        else:
            # Less than the clients' time: they are heard of before.
            world.wait(1.0)


def view(*members: object) -> dict:
    return {m.id: m for m in members}


def kinds(world: World) -> list[tuple[type, str]]:
    return sorted(((type(c), c.server_id) for _, c in world.calls), key=str)
