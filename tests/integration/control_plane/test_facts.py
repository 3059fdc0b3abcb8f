"""The cluster snapshot over real gRPC and HTTP, also when a source does not answer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from control_plane import MetricsServer, Plane, eventually
from eaas.cluster_snapshot import SnapshotReader
from eaas.cluster_snapshot.remote import remote_reader
from eaas.types import MemberState, Role
from rebalancing_box import NAMES, Box

pytestmark = pytest.mark.integration


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = MetricsServer(lambda: b"vllm:generation_tokens_total 41.0\n")
    yield f"http://{server.address}"
    server.close()


def test_a_snapshot_of_a_healthy_cluster(box: Box, endpoint: str) -> None:
    for server in box.servers.values():
        server.busy = 0.5
    with remote_reader(box.monitor, endpoint) as reader:
        eventually(
            lambda: (snapshot := reader.look()).par is not None and snapshot.bound is not None
        )
        snapshot = reader.look()
        servers = snapshot.live(Role.EXPERT_SERVER)
        assert tuple(m.id for m in servers) == NAMES
        assert {m.state for m in servers} == {MemberState.SERVING}
        assert {m.member.role for m in snapshot.members} >= {Role.MONITOR, Role.BALANCER}
        assert snapshot.counters is not None
        assert snapshot.counters.tokens == 41
        truth = box.placement()
        assert snapshot.placement is not None
        assert snapshot.placement.epoch == truth.epoch
        assert np.array_equal(snapshot.placement.holds_LSE, truth.holds_LSE)
        assert (snapshot.uncovered, snapshot.min_replicas) == (
            (),
            truth.holds_LSE.sum(axis=1).min(),
        )
        assert snapshot.par == pytest.approx(box.par(), rel=0.1)
        assert snapshot.bound is not None
        assert 1 <= snapshot.bound <= snapshot.par
        assert snapshot.gap == snapshot.par / snapshot.bound

        before = snapshot.placement.epoch
        assert box.client.rebalance("fractional").applied
        eventually(lambda: (p := reader.look().placement) is not None and p.epoch > before)
        eventually(lambda: "rebalance" in {event.kind for event in reader.look().events})
        assert reader.snapshot.decisions[0].trigger == "manual"
        assert reader.snapshot.decisions[0].verdict == "moves"


def test_without_one_source_the_others_are_shown(plane: Plane) -> None:
    monitor = plane.monitor()
    balancer = plane.balancer(monitor.address)
    for name in ("a", "b"):
        plane.server(monitor.address, name)

    def silent(reader: SnapshotReader) -> set[str]:
        sources = reader.look().sources.values()
        return {source.name for source in sources if source.silent_since is not None}

    with remote_reader(monitor.address, "http://127.0.0.1:1") as reader:
        # Nothing listens on the endpoint's port.
        eventually(lambda: silent(reader) == {"endpoint"} and reader.snapshot.placement is not None)
        balancer.stop()
        eventually(lambda: silent(reader) == {"endpoint", "balancer"})
        assert reader.snapshot.placement is not None
        monitor.stop()
        eventually(lambda: silent(reader) == {"endpoint", "balancer", "monitor"})
        assert {m.member.id for m in reader.snapshot.members} >= {"a", "b"}
        assert [
            event.subject for event in reader.snapshot.events if event.kind == "unreachable"
        ] == [
            "monitor",
            "balancer",
        ]
