"""Rows of the fault contract that the monitor answers for, with real processes, each quoted by its test."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from eaas.grpc_client import channel
from eaas.local import LocalCluster
from eaas.types import MemberState

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]
SERVING, SUSPECT, DEAD = MemberState.SERVING, MemberState.SUSPECT, MemberState.DEAD
SERVERS = tuple(f"expert-server-{i}" for i in range(3))
LEASE_S = 2.0
# The detection window, and what a busy machine adds to it.
W_S, NEWS_S = LEASE_S, LEASE_S / 8 + 1.0


def health(address: str) -> str:
    """What the standard health service answers."""
    with channel(address) as line:
        stub = health_pb2_grpc.HealthStub(line)
        request = health_pb2.HealthCheckRequest(service="eaas.rpc.v1.ExpertService")
        status = stub.Check(request, timeout=10).status
    return health_pb2.HealthCheckResponse.ServingStatus.Name(status)


def reasons(told: Any, member_id: str) -> list[str]:
    """Why a member's state changed, in order."""
    return [reason for name, _, _, reason in told.told if name == member_id]


def view_age_s(client: Any) -> float:
    """The stale-view metric."""
    return client.metrics.registry.get_sample_value("eaas_view_age_seconds")


def connections(client: Any) -> list[tuple[str, int]]:
    """Servers and their lives, as the client is connected."""
    return [(c.server_id, c.incarnation) for c in client.cluster.view().connections if c]


def test_row_5_a_wedged_loop_behind_a_live_heartbeat(
    checkpoint: Callable[..., Path],
    faulty_cluster: Callable[..., Any],
    throttles: Callable[[str], Any],
    join: Callable[..., Any],
    story: Callable[..., Any],
    calling: Callable[..., Any],
) -> None:
    """Row 5: its compute loop wedged, its heartbeat thread alive: the heartbeat carries a progress
    counter; NOT_SERVING within W.
    """
    cluster = faulty_cluster(checkpoint())
    client = join(cluster, dispatch="round_robin")
    told = story(cluster)
    stuck = SERVERS[0]
    address = cluster.children[stuck].address
    with calling(client):
        client.until(lambda: throttles(stuck).batches[1] > 20)
        assert health(address) == "SERVING"
        throttles(stuck).hang()
        client.until(lambda: throttles(stuck).computing)
        began = time.monotonic()
        client.until(lambda: health(address) == "NOT_SERVING")
        assert time.monotonic() - began < W_S + NEWS_S
        client.until(lambda: told.of(stuck) == [SUSPECT])
        assert told.when(stuck, 1, SUSPECT) - began < W_S + NEWS_S
        # Its own word, or its client's, which comes at about the same time.
        reason = reasons(told, stuck)[0]
        assert reason.startswith("no progress for ") or reason == "1 of 1 client gets no answers"
        # It is no longer one of those that a placement may be drafted for; and it is never DEAD of it.
        time.sleep(2 * LEASE_S)
        assert told.of(stuck) == [SUSPECT]
        throttles(stuck).slow(0.0)
        client.until(lambda: told.of(stuck) == [SUSPECT, SERVING])
        client.until(lambda: health(address) == "SERVING")
    assert reasons(told, stuck)[-1] in ("its work moves again", "its clients complain no more")
    assert [told.of(server) for server in SERVERS[1:]] == [[], []]


def test_row_5_a_long_batch_is_not_a_wedged_loop(
    checkpoint: Callable[..., Path],
    faulty_cluster: Callable[..., Any],
    throttles: Callable[[str], Any],
    join: Callable[..., Any],
    story: Callable[..., Any],
) -> None:
    """Row 5: its compute loop wedged, its heartbeat thread alive. A batch of three seconds is none, where
    small ones have shown that it takes as long.
    """
    cluster = faulty_cluster(checkpoint(), servers=1, redundancy=1)
    client = join(cluster, 1, attempt_timeout_s=20.0, layer_timeout_s=60.0, hedge_share=0.0)
    for _ in range(3):
        client.layer(1)
    told = story(cluster)
    # Two experts a token: 0.8 s, so that 64 tokens of eight experts may take the longest there is.
    throttles(SERVERS[0]).slow(0.4)
    client.layer(1)
    began = time.monotonic()
    client.layer(64)
    assert time.monotonic() - began > 3.0
    assert told.of(SERVERS[0]) == []
    assert health(cluster.children[SERVERS[0]].address) == "SERVING"


def test_row_8_a_server_cut_from_the_monitor_only(
    checkpoint: Callable[..., Path],
    faulty_cluster: Callable[..., Any],
    throttles: Callable[[str], Any],
    join: Callable[..., Any],
    story: Callable[..., Any],
    calling: Callable[..., Any],
) -> None:
    """Row 8: server cut from the monitor only: its traffic flows on; no new placements on it."""
    cut_off = SERVERS[0]
    cluster = faulty_cluster(checkpoint(), servers=2, redundancy=2, proxied=(cut_off,))
    client = join(cluster, 2, dispatch="round_robin")
    told = story(cluster)
    epoch = client.cluster.placement.epoch
    with calling(client):
        time.sleep(1.0)
        cluster.proxies[cut_off].cut(up=True, down=True)
        client.until(lambda: told.when(cut_off, 1, DEAD))
        batches = throttles(cut_off).batches[1]
        time.sleep(2 * LEASE_S)
        assert throttles(cut_off).batches[1] > batches + 50, "its traffic flows on"
        placement = client.cluster.placement
        assert placement.epoch == epoch or not held(placement, cut_off), "no new placement on it"
        # The cut is over: its lease was gone, so it is another life, and serves on as that.
        cluster.proxies[cut_off].heal()
        client.until(lambda: (cut_off, 2) in connections(client))
        batches = throttles(cut_off).batches[1]
        client.until(lambda: throttles(cut_off).batches[1] > batches + 20)
    assert told.of(SERVERS[1]) == []


def held(placement: Any, server: str) -> int:
    """Replicas that a placement has on a server."""
    if server not in placement.servers:
        return 0
    return int(np.count_nonzero(placement.holds_LSE[:, placement.servers.index(server)]))


def test_row_9_the_monitor_is_down(
    checkpoint: Callable[..., Path],
    faulty_cluster: Callable[..., Any],
    join: Callable[..., Any],
    story: Callable[..., Any],
    calling: Callable[..., Any],
    free_port: int,
    tmp_path: Path,
) -> None:
    """Row 9: monitor down 60 s: 0 failed calls; a stale-view metric rises; no flapping when it is back.

    Down for four leases here: every time that members and clients know is a lease, a stream's silence of 2 s
    or a backoff of 2 s at most, so a longer time shows nothing more.
    """
    settings = tmp_path / "cluster.yaml"
    settings.write_text(f"monitor:\n  port: {free_port}\n")
    cluster = faulty_cluster(checkpoint(), servers=2, redundancy=2, config_file=settings)
    client = join(cluster, 2, dispatch="round_robin")
    before = connections(client)
    assert len(before) == 2
    with calling(client):
        time.sleep(1.0)
        assert view_age_s(client) < 3.0
        cluster.children["monitor"].signal(signal.SIGKILL)
        time.sleep(4 * LEASE_S)
        assert view_age_s(client) > 3 * LEASE_S
        assert connections(client) == before
        LocalCluster.restart(cluster, "monitor")
        told = story(cluster)
        client.until(lambda: view_age_s(client) < 1.0)
        client.until(lambda: set(SERVERS[:2]) <= set(client.cluster.session.ask_members(5.0) or ()))
        # Whoever is to be taken for dead wrongly would be after this.
        time.sleep(4 * LEASE_S)
        assert connections(client) == before
    assert not [event for event in told.told if event[2] in (SUSPECT, DEAD)]
    assert {incarnation for name, incarnation, *_ in told.told if name != "monitor"} <= {1}


def test_row_9_the_monitor_and_the_balancer_are_down(
    checkpoint: Callable[..., Path],
    faulty_cluster: Callable[..., Any],
    join: Callable[..., Any],
    calling: Callable[..., Any],
    free_port: int,
    tmp_path: Path,
) -> None:
    """Row 9: monitor down: 0 failed calls; a stale-view metric rises; no flapping when it is back. The
    balancer is down with it; afterwards both streams go on: a server that comes is seen, and given experts.
    """
    settings = tmp_path / "cluster.yaml"
    settings.write_text(f"monitor:\n  port: {free_port}\n  data_dir: {tmp_path / 'monitor'}\n")
    cluster = faulty_cluster(checkpoint(), servers=2, redundancy=2, config_file=settings)
    client = join(cluster, 2, dispatch="round_robin")
    before, epoch = connections(client), client.cluster.placement.epoch
    with calling(client):
        time.sleep(1.0)
        for name in ("balancer", "monitor"):
            cluster.children[name].signal(signal.SIGKILL)
        ages = []
        for _ in range(4):
            time.sleep(LEASE_S)
            ages.append(view_age_s(client))
        assert ages == sorted(ages)
        assert ages[-1] > 3 * LEASE_S
        assert connections(client) == before
        assert client.cluster.placement.epoch == epoch
        for name in ("monitor", "balancer"):
            LocalCluster.restart(cluster, name)
        client.until(lambda: view_age_s(client) < 1.0)
        cluster.add_server()
        client.until(lambda: len(connections(client)) == 3)
        assert connections(client)[:2] == before
        assert client.cluster.placement.epoch > epoch


def test_row_10_a_monitor_that_was_paused(
    checkpoint: Callable[..., Path],
    faulty_cluster: Callable[..., Any],
    join: Callable[..., Any],
    story: Callable[..., Any],
    calling: Callable[..., Any],
) -> None:
    """Row 10: monitor paused 10 s: on waking it declares no healthy member dead."""
    cluster = faulty_cluster(checkpoint(), servers=2, redundancy=2)
    client = join(cluster, 2, dispatch="round_robin")
    told = story(cluster)
    before = connections(client)
    with calling(client):
        time.sleep(1.0)
        cluster.children["monitor"].signal(signal.SIGSTOP)
        time.sleep(10.0)
        cluster.children["monitor"].signal(signal.SIGCONT)
        time.sleep(3 * LEASE_S)
        assert view_age_s(client) < 3.0
        assert connections(client) == before
    assert DEAD not in [state for _, _, state, _ in told.told]
