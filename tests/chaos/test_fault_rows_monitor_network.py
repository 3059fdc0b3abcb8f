"""Rows 6 and 8 of the fault contract with network namespaces instead of proxies. Each test quotes its row."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eaas.config import load_config
from eaas.types import MemberState

pytestmark = [pytest.mark.chaos, pytest.mark.nightly, pytest.mark.timeout(300)]
SERVING, SUSPECT, DEAD = MemberState.SERVING, MemberState.SUSPECT, MemberState.DEAD
LEASE_S = 2.0
INSIDE, OUTSIDE = "expert-server-0", "expert-server-1"


@pytest.fixture
def split_cluster(
    checkpoint: Callable[..., Path],
    faulty_cluster: Callable[..., Any],
    namespace: Any,
    tmp_path: Path,
) -> Any:
    """Two servers with the same experts; one of them has its own network namespace."""
    settings = tmp_path / "cluster.yaml"
    # Insecure is safe here: these addresses are unreachable from outside.
    settings.write_text(
        f"monitor:\n  host: {namespace.monitor_host}\nsecurity:\n  insecure: true\n"
    )
    return faulty_cluster(
        checkpoint(),
        servers=2,
        redundancy=2,
        config=load_config(settings),
        config_file=settings,
        namespaces={INSIDE: namespace},
    )


def test_row_6_a_client_and_one_server_cut_from_each_other(
    split_cluster: Any,
    namespace: Any,
    throttles: Callable[[str], Any],
    join: Callable[..., Any],
    watch_members: Callable[..., Any],
    calling: Callable[..., Any],
) -> None:
    """Row 6: client and one server cut from each other, both reach the monitor: that client reroutes;
    the server stays healthy for the others.
    """
    cut_off = join(split_cluster, 2, transport="grpc", dispatch="weights")
    # Shared memory does not cross the network that is cut.
    other = join(split_cluster, 2, transport="shm", dispatch="weights")
    log = watch_members(split_cluster)
    with calling(cut_off, other) as calls:
        time.sleep(1.0)
        namespace.cut("data")
        cut_off.until(lambda: failures(cut_off) > 0)
        batches, made = throttles(INSIDE).batches[1], len(calls.seconds)
        time.sleep(3 * LEASE_S)
        assert throttles(INSIDE).batches[1] > batches + 50, "it must go on serving the other client"
        assert len(calls.seconds) > made + 100
    assert failures(other) == 0
    assert log.states(INSIDE) == []


def failures(client: Any) -> int:
    """Failures of the cut-off server since its last answer."""
    return sum(
        s.failures_since_answer for s in client.metrics.outcomes.read() if s.server_id == INSIDE
    )


def test_row_8_a_server_cut_from_the_monitor_only(
    split_cluster: Any,
    namespace: Any,
    throttles: Callable[[str], Any],
    join: Callable[..., Any],
    watch_members: Callable[..., Any],
    calling: Callable[..., Any],
) -> None:
    """Row 8: server cut from the monitor only: its traffic flows on; no new placements on it."""
    client = join(split_cluster, 2, transport="grpc", dispatch="weights")
    log = watch_members(split_cluster)
    with calling(client):
        time.sleep(1.0)
        namespace.cut("monitor")
        client.until(lambda: log.first_time(INSIDE, 1, DEAD))
        assert log.states(INSIDE) == [SUSPECT, DEAD]
        batches = throttles(INSIDE).batches[1]
        time.sleep(3 * LEASE_S)
        assert throttles(INSIDE).batches[1] > batches + 50, "its traffic flows on"
        namespace.mend("monitor")
        client.until(lambda: log.first_time(INSIDE, 2, SERVING))
        batches = throttles(INSIDE).batches[1]
        client.until(lambda: throttles(INSIDE).batches[1] > batches + 20)
    assert log.states(OUTSIDE) == []
