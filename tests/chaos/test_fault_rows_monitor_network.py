"""Rows 6 and 8 of the fault contract with network namespaces instead of proxies. Each test quotes its row."""

from __future__ import annotations

import time

import pytest

from chaos_world import ChaosWorld, FaultyCluster
from eaas.types import MemberState
from eaas_cli.chaos.network import Namespace

pytestmark = [pytest.mark.chaos, pytest.mark.nightly, pytest.mark.timeout(300)]
SERVING, SUSPECT, DEAD = MemberState.SERVING, MemberState.SUSPECT, MemberState.DEAD
LEASE_S = 2.0
INSIDE, OUTSIDE = "expert-server-0", "expert-server-1"


@pytest.fixture
def split_cluster(chaos: ChaosWorld, namespace: Namespace) -> FaultyCluster:
    """Two servers with the same experts; one of them has its own network namespace."""
    return chaos.start(
        servers=2,
        redundancy=2,
        # Insecure is safe here: these addresses are unreachable from outside.
        settings={"monitor": {"host": namespace.monitor_host}, "security": {"insecure": True}},
        namespaces={INSIDE: namespace},
    )


def test_row_6_a_client_and_one_server_cut_from_each_other(
    chaos: ChaosWorld, split_cluster: FaultyCluster, namespace: Namespace
) -> None:
    """Row 6: client and one server cut from each other, both reach the monitor: that client reroutes;
    the server stays healthy for the others.
    """
    cut_off = chaos.join(split_cluster, 2, transport="grpc", dispatch="weights")
    # Shared memory does not cross the network that is cut.
    other = chaos.join(split_cluster, 2, transport="shm", dispatch="weights")
    log = chaos.watch(split_cluster)
    with chaos.calling(cut_off, other) as calls:
        time.sleep(1.0)
        namespace.cut("data")
        cut_off.until(lambda: cut_off.failures_of(INSIDE) > 0)
        batches, made = chaos.throttle(INSIDE).batches[1], len(calls.seconds)
        time.sleep(3 * LEASE_S)
        assert chaos.throttle(INSIDE).batches[1] > batches + 50, (
            "it must go on serving the other client"
        )
        assert len(calls.seconds) > made + 100
    assert other.failures_of(INSIDE) == 0
    assert log.states(INSIDE) == []


def test_row_8_a_server_cut_from_the_monitor_only(
    chaos: ChaosWorld, split_cluster: FaultyCluster, namespace: Namespace
) -> None:
    """Row 8: server cut from the monitor only: its traffic flows on; no new placements on it."""
    client = chaos.join(split_cluster, 2, transport="grpc", dispatch="weights")
    log = chaos.watch(split_cluster)
    with chaos.calling(client):
        time.sleep(1.0)
        namespace.cut("monitor")
        client.until(lambda: log.first_time(INSIDE, 1, DEAD))
        assert log.states(INSIDE) == [SUSPECT, DEAD]
        batches = chaos.throttle(INSIDE).batches[1]
        time.sleep(3 * LEASE_S)
        assert chaos.throttle(INSIDE).batches[1] > batches + 50, "its traffic flows on"
        namespace.mend("monitor")
        client.until(lambda: log.first_time(INSIDE, 2, SERVING))
        batches = chaos.throttle(INSIDE).batches[1]
        client.until(lambda: chaos.throttle(INSIDE).batches[1] > batches + 20)
    assert log.states(OUTSIDE) == []
