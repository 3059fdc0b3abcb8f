"""What members cost a monitor: one in a process of its own, under the load of simulated members.

`python -m benchmarks.scale.monitor JSON` is that process: a monitor with default settings and a clock at its
event loop. No member is heard while one step of the loop runs.
"""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from asyncio import events
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks.harness.worker import Worker, commands_from, processor_s, working
from eaas.config import MonitorConfig
from eaas.errors import ClusterError, ConfigError
from eaas.launcher_pipe import announce, bind_to_launcher
from eaas.log import configure_logging
from eaas.membership.session import PROTOCOL_VERSION
from eaas.net.grpc_client import channel, leave
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.rpc.v1 import monitor_pb2_grpc
from eaas.types import Member, MemberState, Role, ServerReach
from eaas_cli.bench.command import figure
from monitor.main import run

__all__ = ["bench_monitor"]

_SECONDS = 4.0
_SETTLE_S = 3.0
_INTERVAL_S = 1.0
_PATIENCE_S = 300.0
_SNAPSHOT_S = 60.0
_PROCESSES = 2
_WATCHERS = 300
_SNAPSHOT_READERS = 50
_REPORTS_PER_S = 4.0
# Open files of a process in addition to its connections.
_OTHER_FILES = 256


def bench_monitor(members: int, servers: int) -> dict[str, Any]:
    """Measure a monitor with simulated members, then with one client that reports its connections.

    Args:
        members: All of them; half are clients, which here report nothing.
        servers: Servers that the reporting client is connected to.

    Returns:
        Part `monitor` of the document (see the package).

    Raises:
        ConfigError: The limit of open files is too low.
        EaasError: A process did not start, or the members did not join.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if members + _OTHER_FILES > most:
        raise ConfigError(
            f"{members} members need {members + _OTHER_FILES} open files in the monitor, and the system "
            f"allows {most}: raise `ulimit -Hn`"
        )
    with _loaded_monitor(members) as load:
        empty_mb = load.measure(settle_s=0.0)["rss_mb"]
        join_s = max(load.ask(["join"]))
        quiet = load.measure()
        snapshot = load.snapshot()
        load.tell(load.readers, "fetch", _SNAPSHOT_READERS)
        storm = load.measure(settle_s=0.0)
        load.tell(load.readers, "fetch", 0)
        share = min(_WATCHERS, members) // len(load.members)
        load.ask(["watch", share, snapshot.revision, snapshot.life])
        with _reports(load.address, servers):
            watched = load.measure(settle_s=1.0)
    beats_us = watched["heartbeats_per_s"] * quiet["heartbeat_us"]
    pushes_us = 1e6 * watched["cores"] - beats_us
    return {
        "members": members,
        "join_s": figure(join_s),
        "heartbeat_us": quiet["heartbeat_us"],
        "cores": quiet["cores"],
        "kb_per_member": figure(1024 * (quiet["rss_mb"] - empty_mb) / members),
        "snapshot": {"bytes": snapshot.ByteSize(), "hold_cpu_ms": storm["hold_cpu_ms"]},
        "reach": {
            "bytes": ServerReach.to_proto(_reach_of(servers)).ByteSize(),
            "push_us": figure(pushes_us / max(1, watched["watched_per_s"])),
        },
        "quiet": quiet,
        "storm": storm,
        "watched": watched,
    }


class _Load:
    """A running monitor, its processes of simulated members, and a process of snapshot readers."""

    def __init__(self, monitor: Worker, workers: list[Worker]) -> None:
        assert monitor.address is not None
        self.address = monitor.address
        *self.members, self.readers = workers
        self._monitor = monitor

    def tell(self, worker: Worker, *command: object) -> Any:
        """Send a command to a process; return its answer."""
        worker.send(command, _PATIENCE_S)
        return worker.receive()

    def ask(self, command: list[object]) -> list[Any]:
        """Send the same command to each process of members at once; return the answers in order."""
        for worker in self.members:
            worker.send(command, _PATIENCE_S)
        return [worker.receive() for worker in self.members]

    def snapshot(self) -> pb.Snapshot:
        """Fetch the snapshot that a new watcher gets."""
        with channel(self.address) as link:
            call = monitor_pb2_grpc.MonitorServiceStub(link).Watch(
                pb.WatchRequest(knows_left=True, knows_models=True, knows_frontends=True),
                timeout=_SNAPSHOT_S,
            )
            snapshot: pb.Snapshot = next(iter(call)).snapshot
            leave(call)
        return snapshot

    def measure(self, settle_s: float = _SETTLE_S) -> dict[str, Any]:
        """Measure the monitor for some seconds, after `settle_s`.

        Returns:
            cores (of the monitor's processor time), heartbeat_us (of that), rss_mb, heartbeats_per_s, taken
            (share of the answered turns), lapsed (streams that the monitor ended), answer_ms {p50, p99},
            watched_per_s (messages to watchers), snapshots, snapshot_mb, hold_ms, hold_cpu_ms (the longest
            step of the monitor's loop, by the clock and of the processor).
        """
        time.sleep(settle_s)
        self._figures()
        began, ran_s = time.monotonic(), processor_s(self._monitor.pid)
        time.sleep(_SECONDS)
        found, holds = self._figures()
        ran_s = processor_s(self._monitor.pid) - ran_s
        took_s = time.monotonic() - began
        delays_us = [us for one in found for us in one.pop("delays_us")]
        total = {key: sum(one[key] for one in found) for key in found[0]}
        p50, p99 = np.percentile(delays_us or [0], (50, 99)) / 1e3
        return {
            "cores": figure(ran_s / took_s),
            "heartbeat_us": figure(1e6 * ran_s / max(1, len(delays_us))),
            "rss_mb": self._rss_mb(),
            "heartbeats_per_s": figure(len(delays_us) / took_s),
            "taken": figure(min(1.0, len(delays_us) / max(1, total["sent"] + total["late"]))),
            "lapsed": total["ended"],
            "answer_ms": {"p50": figure(p50), "p99": figure(p99)},
            "watched_per_s": figure(total["watched"] / took_s),
            "snapshots": total["snapshots"],
            "snapshot_mb": figure(total["snapshot_bytes"] / 1e6),
            **holds,
        }

    def _figures(self) -> tuple[list[dict[str, Any]], dict[str, float]]:
        found = [*self.ask(["figures"]), self.tell(self.readers, "figures")]
        return found, self.tell(self._monitor, "holds")

    def _rss_mb(self) -> float:
        status = Path(f"/proc/{self._monitor.pid}/status").read_text()
        return figure(int(status.partition("VmRSS:")[2].split()[0]) / 1024)


@contextmanager
def _loaded_monitor(members: int) -> Iterator[_Load]:
    """Start a monitor, and processes of members that have not joined. Raises EaasError."""
    with working([partial(Worker, "monitor", "benchmarks.scale.monitor")]) as (monitor,):
        ends = [members * n // _PROCESSES for n in range(_PROCESSES + 1)]
        shares = [*pairwise(ends), (0, 0)]
        starts = [
            partial(
                Worker,
                f"members-{n}",
                "benchmarks.scale.members",
                address=monitor.address,
                numbers=share,
                interval_s=_INTERVAL_S,
            )
            for n, share in enumerate(shares)
        ]
        try:
            with working(starts) as workers:
                yield _Load(monitor, workers)
        except ClusterError as error:
            raise ClusterError(f"{error}; the monitor's: {monitor.last_words()}") from error


def _reach_of(servers: int, lost: int | None = None) -> tuple[ServerReach, ...]:
    """Make the report of a client that is connected to all servers but one."""
    return tuple(
        ServerReach(
            f"expert-server-node{server // 4:04}-{server % 4}",
            1,
            "stream: UNAVAILABLE" if server == lost else "",
            server == lost,
        )
        for server in range(servers)
    )


@contextmanager
def _reports(address: str, servers: int) -> Iterator[None]:
    """A client reports another lost connection several times per second, meanwhile."""
    over = threading.Event()
    state = MemberState.SERVING
    client = Member(
        "reporter", Role.ATTENTION_CLIENT, 1, "simulated", "192.0.2.9:1", state, reach=()
    )

    def beats(incarnation: int) -> Iterator[pb.HeartbeatRequest]:
        number = 0
        while not over.wait(1 / _REPORTS_PER_S):
            number += 1
            yield pb.HeartbeatRequest(
                id=client.id,
                incarnation=incarnation,
                state=state.number,
                reach=ServerReach.to_proto(_reach_of(servers, number % servers)),
            )

    def drain() -> None:
        # The stream is left at the end of the measurement.
        with suppress(grpc.RpcError):
            for _ in call:
                pass

    with channel(address) as link:
        stub = monitor_pb2_grpc.MonitorServiceStub(link)
        request = pb.RegisterRequest(member=client.to_proto(), protocol_version=PROTOCOL_VERSION)
        call = stub.Heartbeat(beats(stub.Register(request, timeout=10.0).incarnation))
        reader = threading.Thread(target=drain, daemon=True)
        reader.start()
        try:
            yield
        finally:
            over.set()
            leave(call)
            reader.join(10.0)


class _LoopClock:
    """Measures how long the steps of this process's event loops take."""

    def __init__(self) -> None:
        self._hold_s = self._hold_cpu_s = 0.0

    def attach(self) -> None:
        """Time every callback from now on. Every asyncio loop of the process runs them as `Handle._run`."""
        original = events.Handle._run

        def timed(handle: events.Handle) -> None:
            began, cpu = time.perf_counter(), time.thread_time()
            original(handle)
            self._hold_cpu_s = max(self._hold_cpu_s, time.thread_time() - cpu)
            self._hold_s = max(self._hold_s, time.perf_counter() - began)

        events.Handle._run = timed  # type: ignore[method-assign, assignment]

    def take(self) -> dict[str, float]:
        """Return the longest times since the last call, and reset them."""
        found = {
            "hold_ms": figure(1e3 * self._hold_s),
            "hold_cpu_ms": figure(1e3 * self._hold_cpu_s),
        }
        self._hold_s = self._hold_cpu_s = 0.0
        return found


def main(arguments: str) -> None:
    """Run a monitor with default settings until SIGTERM; any command is answered with the longest steps."""
    bind_to_launcher()
    configure_logging("monitor")
    wanted: dict[str, Any] = json.loads(arguments)
    clock = _LoopClock()
    clock.attach()

    def answer() -> None:
        for _, reply in commands_from(wanted["control"]):
            reply(clock.take())

    def ready(address: str) -> None:
        threading.Thread(target=answer, name="commands", daemon=True).start()
        announce(ready=address)

    run(MonitorConfig(host="127.0.0.1", port=0), ready)


if __name__ == "__main__":
    main(sys.argv[1])
