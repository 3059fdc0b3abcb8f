"""Costs of members for the monitor, and of clients' reports on their connections to servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc

from benchmarks.monitor import make_plan
from benchmarks.monitor.stage import Stage, stage
from eaas.membership.session import PROTOCOL_VERSION
from eaas.net.grpc_client import channel, leave
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.rpc.v1 import monitor_pb2_grpc
from eaas.types import Member, MemberState, Role, ServerReach
from eaas_cli.bench.figures import figure

__all__ = ["bench_monitor_costs", "reach_of"]

_SECONDS = 4.0
_WATCHERS = 300
_REPORTS_PER_S = 4.0
_SNAPSHOT_WATCHERS = 50


def bench_monitor_costs(members: int, servers: int) -> dict[str, Any]:
    """Measure a monitor process with simulated members, then one client that reports its connections.

    Args:
        members: All of them; as in `benchmarks.monitor`, half are clients, which here report nothing.
        servers: Servers that the reporting client is connected to.

    Returns:
        Part `monitor` of the document (see the package).

    Raises:
        EaasError: A process did not start, or the members did not join.
    """
    plan = make_plan(
        members=str(members),
        watchers=str(_WATCHERS),
        per_connection=1,
        loaders=2,
        seconds=_SECONDS,
        snapshot_watchers=_SNAPSHOT_WATCHERS,
    )
    with stage(plan, members) as here:
        empty_mb = here.measure(settle_s=0.0)["rss_mb"]
        here.ask("join")
        alone = here.measure()
        snapshot, _ = here.snapshot()
        storm = here.fetch_snapshots(_SNAPSHOT_WATCHERS)
        watchers = min(_WATCHERS, members)
        here.watch(watchers)
        with _reports(here, servers):
            busy = here.measure(settle_s=1.0)
    beats_us = busy["heartbeats_per_s"] * alone["cpu_us_per_heartbeat"]
    return {
        "members": members,
        "heartbeat_us": alone["cpu_us_per_heartbeat"],
        "cores": alone["cpu_cores"],
        "kb_per_member": figure(1024 * (alone["rss_mb"] - empty_mb) / members),
        "snapshot": {"bytes": snapshot.ByteSize(), "hold_cpu_ms": storm["hold_cpu_ms"]},
        "reach": {
            "bytes": ServerReach.to_proto(reach_of(servers)).ByteSize(),
            "push_us": figure((1e6 * busy["cpu_cores"] - beats_us) / max(1, busy["watched_per_s"])),
        },
    }


def reach_of(servers: int, lost: int | None = None) -> tuple[ServerReach, ...]:
    """Make the report of a client that is connected to all servers but one."""

    def one(server: int) -> ServerReach:
        name = f"expert-server-node{server // 4:04}-{server % 4}"
        is_lost = server == lost
        return ServerReach(name, 1, "stream: UNAVAILABLE" if is_lost else "", is_lost)

    return tuple(map(one, range(servers)))


@contextmanager
def _reports(here: Stage, servers: int) -> Iterator[None]:
    """A client reports another lost connection several times per second, meanwhile."""
    over = threading.Event()
    client = Member(
        "reporter",
        Role.ATTENTION_CLIENT,
        1,
        "simulated",
        "192.0.2.9:1",
        MemberState.SERVING,
        reach=(),
    )

    def beats(incarnation: int) -> Iterator[pb.HeartbeatRequest]:
        number = 0
        while not over.wait(1 / _REPORTS_PER_S):
            number += 1
            yield pb.HeartbeatRequest(
                id=client.id,
                incarnation=incarnation,
                state=client.state.number,
                reach=ServerReach.to_proto(reach_of(servers, number % servers)),
            )

    with channel(here.address) as link:
        stub = monitor_pb2_grpc.MonitorServiceStub(link)
        registered = stub.Register(
            pb.RegisterRequest(member=client.to_proto(), protocol_version=PROTOCOL_VERSION),
            timeout=10.0,
        )
        call = stub.Heartbeat(beats(registered.incarnation))
        reader = threading.Thread(target=lambda: _drain(call), daemon=True)
        reader.start()
        time.sleep(0.1)
        try:
            yield
        finally:
            over.set()
            leave(call)
            reader.join(10.0)


def _drain(call: Any) -> None:
    try:
        for _ in call:
            pass
    except grpc.RpcError:
        # Left at the end of the measurement.
        return
