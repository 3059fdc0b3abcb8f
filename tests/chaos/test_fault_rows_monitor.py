"""Rows 5, 8, 9 and 10 of the fault contract (the monitor), on real processes. Each test quotes its row."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chaos_world import ChaosWorld, Client
from eaas.net.grpc_client import channel
from eaas.types import MemberState
from eaas_cli.local import LocalCluster

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
SERVING, SUSPECT, DEAD = MemberState.SERVING, MemberState.SUSPECT, MemberState.DEAD
SERVERS = tuple(f"expert-server-{i}" for i in range(3))
LEASE_S = 2.0
# The detection window, and the delay of the news on a busy machine.
W_S, NEWS_S = LEASE_S, LEASE_S / 8 + 1.0


def health(address: str) -> str:
    """The answer of the standard health service."""
    with channel(address) as opened:
        stub = health_pb2_grpc.HealthStub(opened)
        request = health_pb2.HealthCheckRequest(service="eaas.rpc.v1.ExpertService")
        status = stub.Check(request, timeout=10).status
    return health_pb2.HealthCheckResponse.ServingStatus.Name(status)


def reasons(log: Any, member_id: str) -> list[str]:
    """The reasons of a member's state changes, in order."""
    return [reason for _, reason in log.changes(member_id)]


def view_age_s(client: Client) -> float:
    """The stale-view metric."""
    return client.metrics.registry.get_sample_value("eaas_view_age_seconds")


def connections(client: Client) -> list[tuple[str, int]]:
    """Servers and incarnations that the client is connected to."""
    return [(c.server_id, c.incarnation) for c in client.cluster.view().connections if c]


def test_row_5_a_wedged_loop_behind_a_live_heartbeat(chaos: ChaosWorld) -> None:
    """Row 5: its compute loop wedged, its heartbeat thread alive: the heartbeat carries a progress
    counter; NOT_SERVING within W.
    """
    cluster = chaos.start()
    client = chaos.join(cluster, dispatch="weights")
    log = chaos.watch(cluster)
    stuck = SERVERS[0]
    address = cluster.children[stuck].address
    with chaos.calling(client):
        client.until(lambda: chaos.throttle(stuck).batches[1] > 20)
        assert health(address) == "SERVING"
        chaos.throttle(stuck).hang()
        client.until(lambda: chaos.throttle(stuck).computing)
        began = time.monotonic()
        client.until(lambda: health(address) == "NOT_SERVING")
        assert time.monotonic() - began < W_S + NEWS_S
        client.until(lambda: log.states(stuck) == [SUSPECT])
        assert log.first_time(stuck, 1, SUSPECT) - began < W_S + NEWS_S
        # The server's own report, or its client's, which comes at about the same time.
        reason = reasons(log, stuck)[0]
        assert reason.startswith("no progress for ") or reason == "1 of 1 client gets no answers"
        # SUSPECT keeps it out of new placements; a wedged loop alone never makes it DEAD.
        time.sleep(1.5 * LEASE_S)
        assert log.states(stuck) == [SUSPECT]
        chaos.throttle(stuck).slow(0.0)
        client.until(lambda: log.states(stuck) == [SUSPECT, SERVING])
        client.until(lambda: health(address) == "SERVING")
    assert reasons(log, stuck)[-1] in ("its work moves again", "its clients get answers again")
    assert [log.states(server) for server in SERVERS[1:]] == [[], []]


def test_row_5_a_long_batch_is_not_a_wedged_loop(chaos: ChaosWorld) -> None:
    """Row 5: its compute loop wedged, its heartbeat thread alive. A batch of three seconds is not a wedged
    loop if small batches have shown that it takes as long.
    """
    cluster = chaos.start(servers=1, redundancy=1)
    client = chaos.join(cluster, 1, attempt_timeout_s=20.0, layer_timeout_s=60.0, hedge_share=0.0)
    for _ in range(3):
        client.layer(1)
    log = chaos.watch(cluster)
    # Two experts for one token take 0.8 s, so 64 tokens with all eight experts may take several seconds.
    chaos.throttle(SERVERS[0]).slow(0.4)
    client.layer(1)
    began = time.monotonic()
    client.layer(64)
    assert time.monotonic() - began > 3.0
    assert log.states(SERVERS[0]) == []
    assert health(cluster.children[SERVERS[0]].address) == "SERVING"


def test_row_8_a_server_cut_from_the_monitor_only(chaos: ChaosWorld) -> None:
    """Row 8: server cut from the monitor only: its traffic flows on; no new placements on it."""
    cut_off = SERVERS[0]
    cluster = chaos.start(servers=2, redundancy=2, cut_off=(cut_off,))
    client = chaos.join(cluster, 2, dispatch="weights")
    log = chaos.watch(cluster)
    epoch = client.cluster.placement.epoch
    with chaos.calling(client):
        time.sleep(0.5)
        cluster.proxies[cut_off].cut(up=True, down=True)
        client.until(lambda: log.first_time(cut_off, 1, DEAD))
        batches = chaos.throttle(cut_off).batches[1]
        time.sleep(LEASE_S)
        assert chaos.throttle(cut_off).batches[1] > batches + 20, "its traffic flows on"
        assert client.cluster.placement.epoch == epoch, "no server joined or left yet"
        # A server that joins triggers a new placement.
        cluster.add_server()
        client.until(lambda: held(client.cluster.placement, SERVERS[2]))
        assert not held(client.cluster.placement, cut_off), "a new placement must not use it"
        # After the cut it returns as a new incarnation, since its lease had expired.
        cluster.proxies[cut_off].heal()
        client.until(lambda: (cut_off, 2) in connections(client))
        batches = chaos.throttle(cut_off).batches[1]
        client.until(lambda: chaos.throttle(cut_off).batches[1] > batches + 20)
    # The other server's experts change with the placements; its state does not.
    assert set(log.states(SERVERS[1])) <= {SERVING}


def held(placement: Any, server: str) -> int:
    """Number of replicas that a placement has on a server."""
    if server not in placement.servers:
        return 0
    return int(np.count_nonzero(placement.holds_LSE[:, placement.servers.index(server)]))


def test_row_9_the_monitor_is_down(chaos: ChaosWorld, free_port: int) -> None:
    """Row 9: monitor down 60 s: 0 failed calls; a stale-view metric rises; no flapping when it is back.

    Down for three leases here: no timer of members and clients (lease, stream silence, backoff) is longer
    than 2 s, so 60 s would show nothing more.
    """
    cluster = chaos.start(servers=2, redundancy=2, settings={"monitor": {"port": free_port}})
    client = chaos.join(cluster, 2, dispatch="weights")
    before = connections(client)
    assert len(before) == 2
    with chaos.calling(client):
        client.until(lambda: view_age_s(client) < 1.5)
        cluster.children["monitor"].signal(signal.SIGKILL)
        time.sleep(3 * LEASE_S)
        assert view_age_s(client) > 2 * LEASE_S
        assert connections(client) == before
        LocalCluster.restart(cluster, "monitor")
        log = chaos.watch(cluster)
        client.until(lambda: view_age_s(client) < 1.0)
        client.until(lambda: set(SERVERS[:2]) <= set(client.cluster.session.ask_members(5.0) or ()))
        # A false death would come after one lease and one check.
        time.sleep(1.5 * LEASE_S)
        assert connections(client) == before
    assert DEAD not in [state for _, _, state, _ in log.events]
    # At most their new registrations, if those came after the watch had begun.
    assert all(log.states(server) in ([], [SERVING]) for server in SERVERS[:2])
    assert {incarnation for name, incarnation, *_ in log.events if name != "monitor"} <= {1}


def test_row_9_the_monitor_and_the_balancer_are_down(
    chaos: ChaosWorld, free_port: int, tmp_path: Path
) -> None:
    """Row 9: monitor down: 0 failed calls; a stale-view metric rises; no flapping when it is back. The
    balancer is down as well; afterwards both streams go on: a server that joins is seen and gets experts.
    """
    monitor = {"port": free_port, "data_dir": str(tmp_path / "monitor")}
    cluster = chaos.start(servers=2, redundancy=2, settings={"monitor": monitor})
    client = chaos.join(cluster, 2, dispatch="weights")
    before, epoch = connections(client), client.cluster.placement.epoch
    with chaos.calling(client):
        client.until(lambda: view_age_s(client) < 1.5)
        for name in ("balancer", "monitor"):
            cluster.children[name].signal(signal.SIGKILL)
        ages = []
        for _ in range(4):
            time.sleep(LEASE_S / 2)
            ages.append(view_age_s(client))
        assert ages == sorted(ages)
        assert ages[-1] > 1.5 * LEASE_S
        assert connections(client) == before
        assert client.cluster.placement.epoch == epoch
        for name in ("monitor", "balancer"):
            LocalCluster.restart(cluster, name)
        client.until(lambda: view_age_s(client) < 1.0)
        cluster.add_server()
        client.until(lambda: len(connections(client)) == 3)
        assert connections(client)[:2] == before
        assert client.cluster.placement.epoch > epoch


def test_row_10_a_monitor_that_was_paused(chaos: ChaosWorld) -> None:
    """Row 10: monitor paused 10 s: on waking it declares no healthy member dead. (Three leases here: if the
    pause counted, every member would have been silent for too long.)
    """
    cluster = chaos.start(servers=2, redundancy=2)
    client = chaos.join(cluster, 2, dispatch="weights")
    log = chaos.watch(cluster)
    before = connections(client)
    with chaos.calling(client):
        client.until(lambda: view_age_s(client) < 1.5)
        cluster.children["monitor"].signal(signal.SIGSTOP)
        time.sleep(3 * LEASE_S)
        cluster.children["monitor"].signal(signal.SIGCONT)
        # A false death would come after one lease and one check.
        time.sleep(1.5 * LEASE_S)
        client.until(lambda: view_age_s(client) < 1.5)
        assert connections(client) == before
    assert DEAD not in [state for _, _, state, _ in log.events]
