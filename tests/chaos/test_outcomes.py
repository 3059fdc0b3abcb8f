"""Clients report servers that send heartbeats but no answers."""

from __future__ import annotations

import time

import pytest

from chaos_world import ChaosWorld
from eaas.types import MemberState

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]
SERVING, SUSPECT, DEAD = MemberState.SERVING, MemberState.SUSPECT, MemberState.DEAD


@pytest.mark.nightly
def test_a_server_that_answers_nobody_is_suspect_though_its_heartbeat_lives(
    chaos: ChaosWorld,
) -> None:
    cluster = chaos.start(servers=2, redundancy=2)
    with chaos.through_proxies() as proxies:
        # By weights, each client asks each server however fast it is.
        clients = [chaos.join(cluster, 2, transport="grpc", dispatch="weights") for _ in range(3)]
        log = chaos.watch(cluster)
        mute = "expert-server-1"
        proxy = proxies[cluster.children[mute].address]
        with chaos.calling(*clients):
            time.sleep(1.0)
            proxy.cut(down=True)
            clients[0].until(lambda: log.states(mute) == [SUSPECT])
            assert (mute, 1, SUSPECT, "3 of 3 clients get no answers") in log.events
            # SUSPECT is a hint: the connections stay, and the member lives.
            assert all(client.cluster.view().usable_S().all() for client in clients)
            time.sleep(1.0)
            proxy.heal()
            clients[0].until(lambda: log.states(mute) == [SUSPECT, SERVING])
            time.sleep(2.0)
    assert log.states(mute) == [SUSPECT, SERVING]
    assert log.states("expert-server-0") == []


@pytest.mark.nightly
def test_a_late_answer_to_a_client_that_is_idle_now_makes_nobody_suspect(chaos: ChaosWorld) -> None:
    cluster = chaos.start(servers=2, redundancy=2)
    client = chaos.join(cluster, 2, dispatch="weights", hedge_share=0.0)
    client.layer()
    log = chaos.watch(cluster)
    late = "expert-server-1"
    chaos.throttle(late).hang()
    client.layer()
    assert client.failures_of(late) == 1
    chaos.throttle(late).slow(0.0)
    client.until(lambda: client.failures_of(late) == 0)
    time.sleep(4.0)
    assert log.states(late) == []


def test_row_6_one_client_without_answers_makes_no_server_suspect(chaos: ChaosWorld) -> None:
    """Row 6: client and one server cut from each other, both reach the monitor: that client reroutes;
    the server stays healthy for the others.
    """
    cluster = chaos.start(servers=2, redundancy=2)
    with chaos.through_proxies() as proxies:
        cut_off = chaos.join(cluster, 2, transport="grpc", dispatch="weights")
    other = chaos.join(cluster, 2, dispatch="weights")
    log = chaos.watch(cluster)
    server = "expert-server-0"
    with chaos.calling(cut_off, other):
        time.sleep(0.5)
        proxies[cluster.children[server].address].cut(up=True, down=True)
        cut_off.until(lambda: cut_off.failures_of(server) > 0)
        time.sleep(4.0)
    assert cut_off.failures_of(server) > 0
    assert other.failures_of(server) == 0
    assert log.states(server) == []
