"""The spare slots' rounds: what servers are told, in which order, and what clients hear."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
import pytest

from balancer.live.hotness import Reading, Work
from balancer.live.plans import PlannerSnapshot
from balancer.live.state import LoadState
from balancer.spare_slots import SpareSlots
from eaas.config import BalancerConfig
from eaas.net.grpc_server import RunningServer, Service, serve
from eaas.rpc.v1 import expert_pb2, expert_pb2_grpc
from eaas.spares import SpareReplicas, holdings, places
from eaas.types import Member, MemberState, Placement, Role
from waiting import eventually

LAYERS, EXPERTS = 2, 4
NAMES = ("s0", "s1")
STEP_S = 30.0
# s0 has the hot experts of both layers; its colleague can help with one of each.
HOLDS_LSE = np.array([[[1, 1, 0, 0], [0, 0, 1, 1]]] * LAYERS, bool)
HOT_LE = np.array([[8000, 2000, 10, 10], [2000, 8000, 10, 10]])


class Server:
    """Holds what it is told, but for what `refuses` says."""

    def __init__(self) -> None:
        self.requests: list[expert_pb2.HoldSparesRequest] = []
        self.held: frozenset[tuple[int, int]] = frozenset()
        self.refuses: dict[str, grpc.StatusCode] = {}
        self.lacks: set[tuple[int, int]] = set()
        self.on_call: Callable[[frozenset[tuple[int, int]]], None] = lambda _wanted: None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return None

    def HoldSpares(self, request: Any, context: Any) -> expert_pb2.HoldSparesResponse:
        self.requests.append(request)
        self.on_call(places(request.layers))
        for why, code in self.refuses.items():
            context.abort(code, why)
        before, self.held = self.held, places(request.layers) - self.lacks
        loaded = len(self.held - before)
        return expert_pb2.HoldSparesResponse(layers=holdings(self.held, LAYERS), loaded=loaded)


class World:
    """Two servers, their load, and the slots' thread."""

    def __init__(self) -> None:
        self.servers = {name: Server() for name in NAMES}
        add = expert_pb2_grpc.add_ExpertServiceServicer_to_server
        self.faces: dict[str, RunningServer] = {
            name: serve([Service("eaas.rpc.v1.ExpertService", add, server)], "127.0.0.1", 0)
            for name, server in self.servers.items()
        }
        self.load = LoadState(BalancerConfig())
        self.snapshot = self.at(1)
        self.totals_LE, self.sequence = np.zeros((LAYERS, EXPERTS), np.int64), 0
        self.observe(HOT_LE)  # The first totals do not count.
        self.published: list[tuple[SpareReplicas, int]] = []
        self.now = 0.0
        self.rounds = threading.Semaphore(0)
        self.slots = SpareSlots(
            SimpleNamespace(load=self.load, snapshot=self.take),  # type: ignore[arg-type]
            STEP_S,
            lambda spares, loaded: self.published.append((spares, loaded)),
            lambda error: self.published.append((error, -1)),  # type: ignore[arg-type]
            clock=lambda: self.now,
        )

    def at(self, epoch: int, *, at_rest: bool = True, **fields: Any) -> PlannerSnapshot:
        members = {
            name: Member(name, Role.EXPERT_SERVER, 1, "h", face.address, MemberState.SERVING)
            for name, face in self.faces.items()
        }
        shares_LSE = HOLDS_LSE.astype(np.float32)
        placement = Placement(epoch, NAMES, HOLDS_LSE, shares_LSE)
        given = {"able": frozenset(NAMES)} | fields
        return PlannerSnapshot(placement, members, at_rest=at_rest, **given)

    def take(self) -> PlannerSnapshot:
        self.rounds.release()
        return self.snapshot

    def observe(self, tokens_LE: np.ndarray) -> None:
        """Add a step to the load."""
        self.totals_LE += tokens_LE
        self.sequence += 1
        reading = Reading(1, self.sequence, self.totals_LE.copy(), Work())
        now = self.snapshot
        assert now.placement is not None
        self.load.stepped({"s0": reading}, now.servers, now.placement, 1000)

    def read(self, tokens_LE: np.ndarray) -> None:
        """Add a step to the load, and let a whole round pass."""
        self.observe(tokens_LE)
        # The second begins once the first is over.
        for _ in range(2):
            self.slots.begin()
            assert self.rounds.acquire(timeout=10)

    def close(self) -> None:
        self.slots.close()
        for face in self.faces.values():
            face.stop(0)


@pytest.fixture
def world() -> Iterator[World]:
    world = World()
    yield world
    world.close()


def last(world: World) -> SpareReplicas:
    return world.published[-1][0]


def test_the_hot_experts_get_a_replica_on_the_other_server(world: World) -> None:
    digests_LE = np.arange(LAYERS * EXPERTS, dtype=np.uint64).reshape(LAYERS, EXPERTS) + 100
    world.snapshot = world.at(1, digests_LE=digests_LE)
    world.read(HOT_LE)
    eventually(lambda: len(world.published) == 2, 5)
    # Those of an earlier placement are void.
    assert world.published[0] == (SpareReplicas(1), 0)
    spares, loaded = world.published[1]
    assert spares == SpareReplicas(1, {"s1": frozenset({(0, 0), (1, 1)})})
    assert loaded == 2
    request = world.servers["s1"].requests[0]
    assert (request.epoch, request.load_s) == (1, STEP_S)
    assert [list(layer.digests) for layer in request.layers] == [[100], [105]]
    # Nothing changes: servers are asked again, since one may have restarted, and clients hear nothing.
    asked = len(world.servers["s1"].requests)
    world.read(HOT_LE)
    eventually(lambda: len(world.servers["s1"].requests) > asked, 5)
    assert len(world.published) == 2
    # But every 10 seconds, for clients that have dropped some.
    world.now = 10.0
    world.read(HOT_LE)
    eventually(lambda: len(world.published) == 3, 5)
    assert world.published[2] == (spares, 0)


def test_clients_hear_of_an_end_before_the_server(world: World) -> None:
    world.read(HOT_LE)
    eventually(lambda: len(world.published) == 2, 5)
    seen: list[int] = []

    def spy(wanted: frozenset[tuple[int, int]]) -> None:
        if (0, 0) not in wanted:
            seen.append(len(world.published))

    world.servers["s1"].on_call = spy
    for _ in range(8):
        world.read(HOT_LE[::-1])
    eventually(lambda: len(world.published) >= 4, 5)
    assert world.published[2] == (SpareReplicas(1), 0)
    assert last(world) == SpareReplicas(1, {"s1": frozenset({(0, 1), (1, 0)})})
    assert seen[0] >= 3


@pytest.mark.parametrize("fault", ["lacks one", "cannot answer"])
def test_only_what_a_server_holds_is_published(world: World, fault: str) -> None:
    server, kept = world.servers["s1"], {"s1": frozenset({(0, 0)})}
    if fault == "lacks one":
        server.lacks = {(1, 1)}
    else:
        server.refuses, kept = {"not now": grpc.StatusCode.UNAVAILABLE}, {}
    world.read(HOT_LE)
    eventually(lambda: last(world) == SpareReplicas(1, kept), 5)
    server.lacks, server.refuses = set(), {}
    world.read(HOT_LE)
    eventually(lambda: len(last(world)) == 2, 5)


@pytest.mark.parametrize("code", [grpc.StatusCode.DATA_LOSS, grpc.StatusCode.UNIMPLEMENTED])
def test_a_server_that_cannot_gets_none_in_this_placement(world, code) -> None:
    """Its copy of the checkpoint is damaged, or its release is older."""
    world.servers["s1"].refuses = {"no": code}
    for _ in range(3):
        world.read(HOT_LE)
    assert len(world.servers["s1"].requests) == 1
    assert len(world.servers["s0"].requests) >= 3
    world.servers["s1"].refuses = {}
    world.snapshot = world.at(2)
    world.read(HOT_LE)
    eventually(lambda: len(last(world)) == 2, 5)
    assert last(world).epoch == 2


def test_closing_ends_a_call_that_hangs(world: World) -> None:
    asked, over = threading.Event(), threading.Event()

    def hang(_wanted: frozenset[tuple[int, int]]) -> None:
        asked.set()
        over.wait(10)

    world.servers["s1"].on_call = hang
    world.observe(HOT_LE)
    world.slots.begin()
    assert asked.wait(10)
    published = len(world.published)
    world.slots.close()
    assert "spares" not in {thread.name for thread in threading.enumerate()}
    assert len(world.published) == published
    over.set()


def test_roll_outs_and_lost_servers_are_left_alone(world: World) -> None:
    world.snapshot = world.at(1, at_rest=False)
    world.read(HOT_LE)
    # Without s0 some experts have no replica: the planner is about to load them.
    now = world.at(1, able=frozenset({"s1"}))
    world.snapshot = replace(now, servers={"s1": now.servers["s1"]})
    world.read(HOT_LE)
    assert not any(len(spares) for spares, _ in world.published)
    assert not any(server.requests for server in world.servers.values())
