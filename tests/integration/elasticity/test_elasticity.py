"""Servers come and go while a client decodes: same tokens, no failed call, nothing restarted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from attention_client.reach import ReachBook
from control_plane import FakeExpertServer, eventually
from eaas.balancer_calls import drain_server, scale_servers
from eaas.errors import ClusterError, EaasError
from eaas.grpc_client import channel
from eaas.local.nursery import Nursery
from eaas.local.process import ChildProcess, wait_ready
from eaas.rpc.v1 import expert_pb2, expert_pb2_grpc
from eaas.types import Member, MemberState

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

THREE = ("expert-server-0", "expert-server-1", "expert-server-2")
CYCLES = int(os.environ.get("GROW_SHRINK_CYCLES", "3"))


@pytest.fixture
def cleanup() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def by_hand(
    cluster: Any,
    name: str,
    tmp_path: Path,
    cleanup: ExitStack,
    *options: str,
    nursery: Nursery | None = None,
) -> ChildProcess:
    """What a person types; without a nursery in an interpreter that has imported nothing."""
    arguments = ["expert-server", "--id", name, "--join", cluster.monitor_address]
    arguments += ["--kernel", "packed", *options]
    child = ChildProcess(name, arguments, tmp_path, nursery=nursery)
    cleanup.callback(child.reap, 10)
    cleanup.callback(child.signal, signal.SIGKILL)
    return child


def test_a_server_started_by_hand_takes_part(
    elastic: Callable[..., Any], tmp_path: Path, cleanup: ExitStack, nursery: Nursery
) -> None:
    cluster, client = elastic()
    model = ("--model", str(cluster.model))
    with client.decoding():
        child = by_hand(cluster, "by-hand", tmp_path, cleanup, *model, nursery=nursery)
        wait_ready([child], 60)
        client.wait_settled("by-hand", *THREE)
    assert client.cluster.placement.epoch == 2


def test_a_server_without_a_checkpoint_takes_part(
    elastic: Callable[..., Any], tmp_path: Path, cleanup: ExitStack
) -> None:
    """Its peers send it what it is to hold, also when there is more of that later on."""
    cluster, client = elastic()
    with client.decoding():
        wait_ready([by_hand(cluster, "by-hand", tmp_path, cleanup)], 60)
        client.wait_settled("by-hand", *THREE)
        cluster.scale(1)
        client.wait_settled("by-hand", "expert-server-0")
    assert not list(tmp_path.glob("eaas-checkpoint-*"))


def test_a_server_without_a_checkpoint_needs_one_that_has_one(
    elastic: Callable[..., Any],
    kill: Callable[..., None],
    tmp_path: Path,
    cleanup: ExitStack,
    nursery: Nursery,
) -> None:
    cluster, client = elastic(servers=1, redundancy=1)
    kill(cluster, "expert-server-0")
    until = client.cluster.session.wait_for
    assert until(lambda view: view.members["expert-server-0"].state is MemberState.DEAD, 30)
    child = by_hand(cluster, "by-hand", tmp_path, cleanup, nursery=nursery)
    with pytest.raises(EaasError, match="no server of the cluster has a checkpoint to share"):
        wait_ready([child], 60)


def test_a_drained_server_leaves_and_nobody_notices(elastic: Callable[..., Any]) -> None:
    cluster, client = elastic()
    child = cluster.children["expert-server-1"]
    with client.decoding():
        drain_server(cluster.children["balancer"].address, "expert-server-1")
        assert child.reap(60)
        client.wait_settled("expert-server-0", "expert-server-2")
    assert child.process.returncode == 0
    lost = client.cluster.metrics.registry.get_sample_value
    assert not lost("eaas_failovers_total", {"reason": "lost"})


def test_the_last_server_does_not_leave(elastic: Callable[..., Any]) -> None:
    cluster, client = elastic(servers=2, redundancy=1)
    balancer = cluster.children["balancer"].address
    with client.decoding():
        with pytest.raises(ClusterError, match="'nobody' is no live expert server"):
            drain_server(balancer, "nobody")
        drain_server(balancer, "expert-server-0")
        client.wait_settled("expert-server-1", replicas=1)
        with pytest.raises(ClusterError, match="expert-server-1 is the last server that can hold"):
            drain_server(balancer, "expert-server-1")
    with pytest.raises(ClusterError, match="nobody starts servers for this cluster"):
        scale_servers(balancer, 3)
    with pytest.raises(ClusterError, match="0 servers would hold no experts"):
        scale_servers(balancer, 0)


def test_from_three_to_five_to_three(elastic: Callable[..., Any]) -> None:
    cluster, client = elastic()
    with client.decoding():
        cluster.scale(5)
        client.wait_settled(*THREE, "expert-server-3", "expert-server-4")
        cluster.scale(3)
        client.wait_settled(*THREE)


@pytest.mark.parametrize("redundancy", [1, 2])
def test_a_server_that_is_dead_for_good_is_replaced(
    elastic: Callable[..., Any], kill: Callable[..., None], redundancy: int
) -> None:
    """With one replica, coverage is back long before the dead server's return is given up."""
    cluster, client = elastic(dead_grace_s=3.0, redundancy=redundancy)
    with client.decoding():
        kill(cluster, "expert-server-2")
        client.wait_settled("expert-server-0", "expert-server-1", replicas=redundancy)


class StuckServer(FakeExpertServer):
    """Joins, and never has its share."""

    def PreparePlacement(
        self, request: expert_pb2.PreparePlacementRequest, context: Any
    ) -> expert_pb2.PreparePlacementResponse:
        self.released.clear()
        return super().PreparePlacement(request, context)

    def close(self, deregister: bool = True) -> None:
        super().close(deregister)
        self.released.set()


def test_row_11_a_balancer_killed_mid_push(
    elastic: Callable[..., Any],
    kill: Callable[..., None],
    cleanup: ExitStack,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Row 11: balancer killed mid-push: every server holds all of the old epoch or all of the new; no
    expert uncovered.
    """
    # The fake server grants no slots. A client that does not report its reach counts as connected to it.
    monkeypatch.setattr(ReachBook, "report", lambda *_: None)
    cluster, client = elastic()
    old = client.cluster.placement
    shape = client.servers()[THREE[0]].model
    with client.decoding():
        joiner = StuckServer(cluster.monitor_address, "stuck", shape)
        cleanup.callback(joiner.close)
        eventually(lambda: joiner.requests and all(s.epoch > old.epoch for s in three(client)))
        kill(cluster, "balancer")
        new = joiner.requests[0].epoch
        assert {server.epoch for server in three(client)} == {new}
        assert client.cluster.placement is old, "it was not published"
        for server in three(client):
            share = [set(experts) for experts in old.experts_of(server.id)]
            assert all(s <= h for s, h in zip(share, held_by(server), strict=True)), server.id
        client.more_rounds(2)
        assert not client.cluster.uncovered()
        joiner.close()
        cluster.restart("balancer")
        client.wait_settled(*THREE)
        cluster.add_server()
        client.wait_settled(*THREE, "expert-server-3")


def three(client: Any) -> list[Member]:
    members = client.servers()
    return [members[name] for name in THREE]


def held_by(server: Member) -> list[set[int]]:
    """The experts of each layer, as the server says."""
    with channel(server.address) as line:
        stub = expert_pb2_grpc.ExpertServiceStub(line)
        held = stub.ListExperts(expert_pb2.ListExpertsRequest(), timeout=10)
    return [set(layer.experts) for layer in held.layers]


def leftovers(cluster: Any) -> dict[str, dict[str, int]]:
    """What must not grow, by process."""
    names = ("monitor", "balancer", *THREE)
    processes = {name: psutil.Process(cluster.children[name].pid) for name in names}
    processes["client"] = psutil.Process()
    return {
        name: {
            "bytes": process.memory_info().rss,
            "descriptors": process.num_fds(),
            "threads": process.num_threads(),
            "segments": segments(process.pid),
        }
        for name, process in processes.items()
    }


def segments(pid: int) -> int:
    """Arenas that are mapped."""
    return Path(f"/proc/{pid}/maps").read_text().count("/dev/shm/")


@pytest.mark.timeout(300 + 60 * CYCLES)
def test_growing_and_shrinking_leaves_nothing_behind(elastic: Callable[..., Any]) -> None:
    """GROW_SHRINK_CYCLES=50 for the long run; `pytest -s` shows its figures."""
    cluster, client = elastic()
    mapped = segments(os.getpid())

    def cycle() -> None:
        cluster.scale(4)
        client.wait_settled(*THREE, "expert-server-3")
        cluster.scale(3)
        client.wait_settled(*THREE)
        # A thread of its own lets go of the server that has left.
        eventually(lambda: segments(os.getpid()) == mapped)

    with client.decoding():
        for _ in range(2):
            cycle()
        before = leftovers(cluster)
        for _ in range(CYCLES):
            cycle()
        client.more_rounds(3)
        after = leftovers(cluster)
    print(f"{CYCLES} cycles, {client.rounds} generations")
    for name, was in before.items():
        now = after[name]
        print(f"{name}: {was} -> {now}")
        # gRPC's pollers and pools come and go by a few; what leaks does so in each cycle.
        assert now["descriptors"] - was["descriptors"] < max(8, CYCLES), (name, was, now)
        assert now["threads"] - was["threads"] < max(8, CYCLES), (name, was, now)
        assert now["segments"] <= was["segments"], (name, was, now)
        assert now["bytes"] - was["bytes"] < (24 << 20) + CYCLES * (100 << 10), (name, was, now)
    gone = client.cluster.session.view.members["expert-server-3"]
    assert gone.state is MemberState.LEFT
    assert gone.incarnation == 2 + CYCLES


def test_commands_are_refused_in_one_line(checkpoint: Callable[..., Path]) -> None:
    for command in (["scale", "4"], ["drain", "expert-server-0"]):
        done = subprocess.run(
            [sys.executable, "-m", "eaas", *command, "--endpoint", "http://127.0.0.1:9"],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 2
        assert "no cluster answers there" in done.stderr
