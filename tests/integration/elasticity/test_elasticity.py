"""Servers join and leave while a client decodes: same tokens, no failed call, no restart."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest

from attention_client.connections.reach import ReachBook
from control_plane import FakeExpertServer, eventually, held_by
from eaas.errors import EaasError
from eaas.nodes import different_nodes
from eaas.rpc.v1 import expert_pb2
from eaas.types import Member, MemberState
from eaas_cli.local.fork_server import ForkServer
from eaas_cli.local.process import ChildProcess, wait_ready
from eaas_cli.local.scaling import Scaler

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

THREE = ("expert-server-0", "expert-server-1", "expert-server-2")
CYCLES = int(os.environ.get("GROW_SHRINK_CYCLES", "5"))


def by_hand(
    cluster: Any,
    name: str,
    tmp_path: Path,
    cleanup: ExitStack,
    fork_server: ForkServer,
    *options: str,
) -> ChildProcess:
    """Start a server as an operator does."""
    arguments = ["expert-server", "--id", name, "--join", cluster.monitor_address]
    arguments += ["--kernel", "native", *options]
    child = ChildProcess(name, arguments, tmp_path, fork_server=fork_server)
    cleanup.callback(child.reap, 10)
    cleanup.callback(child.signal, signal.SIGKILL)
    return child


def scale(cluster: Any, servers: int) -> None:
    """Scale as `eaas up` does, one server at a time."""
    scaler = Scaler(cluster)
    scaler.want(servers)

    def is_scaled() -> bool:
        scaler.step()
        return not scaler.busy

    eventually(is_scaled, 120.0, what=f"scaling to {servers}")


def test_a_server_without_a_checkpoint_takes_part(
    elastic: Callable[..., Any], tmp_path: Path, cleanup: ExitStack, fork_server: ForkServer
) -> None:
    """Its peers send it its experts, also those that it gets later."""
    cluster, client = elastic()
    with client.decoding():
        wait_ready([by_hand(cluster, "by-hand", tmp_path, cleanup, fork_server)], 60)
        client.wait_settled("by-hand", *THREE)
        scale(cluster, 1)
        client.wait_settled("by-hand", "expert-server-0")
    assert not list(tmp_path.glob("eaas-checkpoint-*"))


@pytest.mark.nightly
def test_a_server_without_a_checkpoint_needs_one_that_has_one(
    elastic: Callable[..., Any],
    kill: Callable[..., None],
    tmp_path: Path,
    cleanup: ExitStack,
    fork_server: ForkServer,
) -> None:
    cluster, client = elastic(servers=1, redundancy=1)
    kill(cluster, "expert-server-0")
    until = client.cluster.session.wait_for
    assert until(lambda view: view.members["expert-server-0"].state is MemberState.DEAD, 30)
    child = by_hand(cluster, "by-hand", tmp_path, cleanup, fork_server)
    with pytest.raises(EaasError, match="no server of the cluster has a checkpoint to share"):
        wait_ready([child], 60)


@pytest.mark.parametrize("redundancy", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_a_server_that_is_dead_for_good_is_replaced(
    elastic: Callable[..., Any], kill: Callable[..., None], redundancy: int
) -> None:
    """With one replica, coverage is restored before the grace period for the dead server ends."""
    cluster, client = elastic(dead_grace_s=3.0, redundancy=redundancy)
    with client.decoding():
        kill(cluster, "expert-server-2")
        client.wait_settled("expert-server-0", "expert-server-1", replicas=redundancy)


class StuckServer(FakeExpertServer):
    """Joins, and never finishes loading its experts."""

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
    # The fake server grants no slots. A client that does not report its connections counts as connected.
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
        assert client.cluster.placement is old, "the new placement must not be published"
        for server in three(client):
            share_LE = old.holds_LSE[:, old.servers.index(server.id)]
            assert (held_by(server) >= share_LE).all(), server.id
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


def leftovers(cluster: Any) -> dict[str, dict[str, int]]:
    """Resources that must not grow, by process."""
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
    """Number of mapped arenas."""
    return Path(f"/proc/{pid}/maps").read_text().count("/dev/shm/")


@pytest.mark.nightly
@pytest.mark.timeout(300 + 60 * CYCLES)
def test_growing_and_shrinking_leaves_nothing_behind(elastic: Callable[..., Any]) -> None:
    """GROW_SHRINK_CYCLES is the number of cycles; `pytest -s` shows the figures."""
    cluster, client = elastic()
    mapped = segments(os.getpid())

    def cycle() -> None:
        scale(cluster, 4)
        client.wait_settled(*THREE, "expert-server-3")
        scale(cluster, 3)
        client.wait_settled(*THREE)
        # A thread closes the connection to the server that left.
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
        # The number of gRPC's pollers varies by a few; a leak would grow in each cycle.
        assert now["descriptors"] - was["descriptors"] < max(8, CYCLES), (name, was, now)
        assert now["threads"] - was["threads"] < max(8, CYCLES), (name, was, now)
        assert now["segments"] <= was["segments"], (name, was, now)
        assert now["bytes"] - was["bytes"] < (24 << 20) + CYCLES * (100 << 10), (name, was, now)
    gone = client.cluster.session.view.members["expert-server-3"]
    assert gone.state is MemberState.LEFT
    assert gone.incarnation == 2 + CYCLES


def test_a_node_fails_with_all_its_servers(
    elastic: Callable[..., Any], tmp_path: Path, cleanup: ExitStack, fork_server: ForkServer
) -> None:
    """Of 4 servers on 2 nodes, both of one node die at once: no call fails, and no token is wrong."""
    cluster, client = elastic(servers=2, redundancy=2, node="rack1/a")
    config = tmp_path / "b.yaml"
    config.write_text("expert_server: {node: rack2/b}")
    others = [
        by_hand(cluster, name, tmp_path, cleanup, fork_server, "--config", str(config))
        for name in ("by-hand-0", "by-hand-1")
    ]
    wait_ready(others, 60)
    survivors = ("expert-server-0", "expert-server-1")
    client.wait_settled(*survivors, "by-hand-0", "by-hand-1")
    placement = client.cluster.placement
    assert placement is not None
    nodes = [client.servers()[s].node for s in placement.servers]
    assert sorted(nodes) == ["rack1/a", "rack1/a", "rack2/b", "rack2/b"]
    assert (different_nodes(placement.replicas, nodes) == 2).all()
    assert client.cluster.nodes_LE().min() == 2
    with client.decoding():
        for child in others:
            child.signal(signal.SIGKILL)
        client.more_rounds(3)
        eventually(lambda: set(client.servers()) == set(survivors))
        client.more_rounds(3)
    assert not client.cluster.uncovered()
    assert client.cluster.nodes_LE().min() == 1
