"""Balancer, monitor and members over real gRPC, with fake expert servers."""

from __future__ import annotations

import contextlib
import threading
import time
from contextlib import ExitStack

import grpc
import pytest

from balancer.main import Balancer
from control_plane import (
    JOINING,
    LEFT,
    PATIENCE_S,
    SERVING,
    Observer,
    Plane,
    eventually,
    has_state,
    port_of,
)
from eaas.config import BalancerConfig
from eaas.control_plane.balancer_client import BalancerClient
from eaas.control_plane.placement_watch import PlacementWatch
from eaas.errors import ClusterError, ConfigError, PortInUseError
from eaas.net.grpc_client import channel
from eaas.rpc.v1 import (
    balancer_pb2,
    balancer_pb2_grpc,
)
from eaas.types import ModelShape, Placement, Role
from eaas_cli.local.scaling import ScaleWatch

pytestmark = pytest.mark.integration


def follow(observer: Observer, cleanup: ExitStack) -> tuple[PlacementWatch, list[Placement]]:
    placements: list[Placement] = []

    def address() -> str | None:
        balancers = observer.session.view.live(Role.BALANCER)
        return balancers[0].address if balancers else None

    watch = PlacementWatch(address, placements.append)
    cleanup.callback(watch.close)
    return watch, placements


def test_from_nothing_to_a_placement_and_back_from_a_loss(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    address = plane.monitor().address
    other = ModelShape("tiny", 8, 64, 2, ("l0",), "float32", "digest-b")
    odd = plane.server(address, "s9", shape=other)
    observer = plane.observe(address)
    _, placements = follow(observer, plane.stack)
    balancer = plane.balancer(address)
    first = plane.server(address, "s1")
    observer.wait(has_state("s1", JOINING))
    assert placements == []
    with channel(balancer.address) as line:
        stub = balancer_pb2_grpc.BalancerServiceStub(line)
        assert stub.GetPlacement(balancer_pb2.GetPlacementRequest()).placement.epoch == 0
        second = plane.server(address, "s2", failures=2)
        eventually(lambda: placements)
        assert (
            stub.GetPlacement(balancer_pb2.GetPlacementRequest()).placement
            == placements[0].to_proto()
        )
    (placement,) = placements
    assert (placement.epoch, placement.servers) == (1, ("s1", "s2"))
    assert len(second.requests) == 3  # Two failures, then the retry.
    for server in (first, second):
        view = observer.wait(has_state(server.name, SERVING))
        assert view.members[server.name].experts == 3 * 8
        layers = server.requests[-1].layers
        assert [list(layer.experts) for layer in layers] == [list(range(8))] * 3
        assert [list(layer.shares) for layer in layers] == [[0.5] * 8] * 3

    # A server that joins gets its share, and the others retire theirs.
    third = plane.server(address, "s3")
    eventually(lambda: third.retired and len(placements) > 1)
    assert [p.epoch for p in placements] == [1, 2]
    assert placements[1].servers == ("s1", "s2", "s3")
    for server in (first, second, third):
        share = [tuple(h.experts) for h in placements[1].holdings_of(server.name)]
        eventually(lambda s=server, share=share: [tuple(sorted(h)) for h in s.held] == share)
    counts = [server.experts for server in (first, second, third)]
    assert sum(counts) == 2 * 3 * 8
    assert max(counts) - min(counts) <= 2

    # A placed server that returns gets its share again, in the same epoch.
    second.close()
    observer.wait(has_state("s2", LEFT))
    back = plane.server(address, "s2")
    view = observer.wait(has_state("s2", SERVING))
    assert view.members["s2"].incarnation == 2
    assert back.requests[-1].epoch == 2
    assert back.experts == counts[1]
    assert len(placements) == 2

    # The server of another model has got nothing, and the log says so.
    assert odd.requests == []
    assert any("s9 gets no experts" in line and "digest-b" in line for line in caplog.messages)


def test_a_drained_server_is_told_to_hold_nothing(plane: Plane) -> None:
    address = plane.monitor().address
    _, placements = follow(plane.observe(address), plane.stack)
    balancer = plane.balancer(address, redundancy=1)
    first, second = (plane.server(address, name) for name in ("s1", "s2"))
    eventually(lambda: first.retired and second.retired)
    with channel(balancer.address) as line:
        stub = balancer_pb2_grpc.BalancerServiceStub(line)
        stub.DrainServer(balancer_pb2.DrainServerRequest(server_id="s2"))
        eventually(lambda: not second.experts)
        assert first.experts == 3 * 8
        eventually(lambda: placements and placements[-1].servers == ("s1",))
        for name, code in (("s1", "FAILED_PRECONDITION"), ("s3", "NOT_FOUND")):
            with pytest.raises(grpc.RpcError) as refusal:
                stub.DrainServer(balancer_pb2.DrainServerRequest(server_id=name))
            assert refusal.value.code().name == code


def test_the_wanted_number_of_servers_reaches_the_launcher(plane: Plane) -> None:
    balancer = plane.balancer(plane.monitor().address)
    client = plane.stack.enter_context(BalancerClient(balancer.address))
    with pytest.raises(ClusterError, match="nobody starts servers for this cluster"):
        client.scale(3)
    wanted: list[int] = []
    watch = ScaleWatch(lambda: balancer.address, lambda servers, _wish: wanted.append(servers))
    plane.stack.callback(watch.close)

    def accepted() -> bool:
        with contextlib.suppress(ClusterError):
            client.scale(3)
            return True
        return False

    eventually(accepted)
    eventually(lambda: wanted == [3])
    # The same number again: a server that was asked for may have failed.
    for asked in ([3, 5], [3, 5, 5]):
        client.scale(5)
        # A watch that is behind hears the last number only.
        eventually(lambda asked=asked: wanted == asked)  # type: ignore[misc]
    watch.close()
    # A launcher that connects later gets the last number.
    late: list[int] = []
    plane.stack.callback(
        ScaleWatch(lambda: balancer.address, lambda servers, _wish: late.append(servers)).close
    )
    eventually(lambda: late == [5])


def test_a_server_that_hangs_does_not_keep_the_balancer_from_ending(plane: Plane) -> None:
    address = plane.monitor().address
    server = plane.server(address, "s1")
    server.released.clear()
    balancer = Balancer(
        BalancerConfig(expected_servers=1, redundancy=1, apply_timeout_s=3600.0),
        address,
        on_stopping=lambda: None,
    )
    eventually(lambda: server.requests)
    started = time.monotonic()
    balancer.stop()
    assert time.monotonic() - started < PATIENCE_S / 2
    running = {thread.name for thread in threading.enumerate()}
    assert not running & {"rollout", "hotness", "journal"}
    server.released.set()


def test_wrong_balancer_settings_and_no_monitor(plane: Plane) -> None:
    monitor = plane.monitor()
    with pytest.raises(ConfigError, match="redundancy 3 is above expected_servers 2"):
        Balancer(BalancerConfig(expected_servers=2, redundancy=3), monitor.address, lambda: None)
    with pytest.raises(PortInUseError):
        Balancer(BalancerConfig(port=port_of(monitor.address)), monitor.address, lambda: None)
