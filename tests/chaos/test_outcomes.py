"""Clients report servers that send heartbeats but no answers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eaas.types import MemberState

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180)]
SERVING, SUSPECT, DEAD = MemberState.SERVING, MemberState.SUSPECT, MemberState.DEAD


@pytest.mark.nightly
def test_a_server_that_answers_nobody_is_suspect_though_its_heartbeat_lives(
    checkpoint: Callable[..., Path],
    faulty_cluster: Callable[..., Any],
    join: Callable[..., Any],
    watch_members: Callable[..., Any],
    calling: Callable[..., Any],
    through_proxies: Callable[..., Any],
) -> None:
    cluster = faulty_cluster(checkpoint(), servers=2, redundancy=2)
    with through_proxies() as proxies:
        # Round robin: each client asks each server however fast it is.
        clients = [join(cluster, 2, transport="grpc", dispatch="weights") for _ in range(3)]
        log = watch_members(cluster)
        mute = "expert-server-1"
        proxy = proxies[cluster.children[mute].address]
        with calling(*clients):
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
def test_a_late_answer_to_a_client_that_is_idle_now_makes_nobody_suspect(
    checkpoint: Callable[..., Path],
    faulty_cluster: Callable[..., Any],
    throttles: Callable[[str], Any],
    join: Callable[..., Any],
    watch_members: Callable[..., Any],
) -> None:
    cluster = faulty_cluster(checkpoint(), servers=2, redundancy=2)
    client = join(cluster, 2, dispatch="weights", hedge_share=0.0)
    client.layer()
    log = watch_members(cluster)
    late = "expert-server-1"
    throttles(late).hang()
    client.layer()
    assert failures_of(client, late) == 1
    throttles(late).slow(0.0)
    client.until(lambda: failures_of(client, late) == 0)
    time.sleep(4.0)
    assert log.states(late) == []


def test_row_6_one_client_without_answers_makes_no_server_suspect(
    checkpoint: Callable[..., Path],
    faulty_cluster: Callable[..., Any],
    join: Callable[..., Any],
    watch_members: Callable[..., Any],
    calling: Callable[..., Any],
    through_proxies: Callable[..., Any],
) -> None:
    """Row 6: client and one server cut from each other, both reach the monitor: that client reroutes;
    the server stays healthy for the others.
    """
    cluster = faulty_cluster(checkpoint(), servers=2, redundancy=2)
    with through_proxies() as proxies:
        cut_off = join(cluster, 2, transport="grpc", dispatch="weights")
    other = join(cluster, 2, dispatch="weights")
    log = watch_members(cluster)
    server = "expert-server-0"
    with calling(cut_off, other):
        time.sleep(0.5)
        proxies[cluster.children[server].address].cut(up=True, down=True)
        cut_off.until(lambda: failures_of(cut_off, server) > 0)
        time.sleep(4.0)
    assert failures_of(cut_off, server) > 0
    assert failures_of(other, server) == 0
    assert log.states(server) == []


def failures_of(client: Any, server: str) -> int:
    """Failures since the server's last answer."""
    return sum(
        s.failures_since_answer for s in client.metrics.outcomes.read() if s.server_id == server
    )
