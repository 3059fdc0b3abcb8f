"""A monitor process and the processes of its simulated members, seen by the launcher."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.monitor.plan import Plan
from eaas.errors import ClusterError
from eaas.net.grpc_client import channel, leave
from eaas.rpc.v1 import monitor_pb2 as pb
from eaas.rpc.v1 import monitor_pb2_grpc
from eaas_cli.bench.figures import figure
from eaas_cli.bench.machine import processor_s
from eaas_cli.bench.worker import Worker, working
from eaas_cli.local.process import stop_all, wait_ready

__all__ = ["Stage", "percentiles_ms", "stage"]

_START_S = 30.0
_SNAPSHOT_S = 60.0


class Stage:
    """A running monitor with its processes of simulated members; made by `stage`.

    Attributes:
        size_of_last: Number of members in the last process.
    """

    def __init__(
        self,
        monitor: Worker,
        workers: Sequence[Worker],
        snapshot_reader: Worker,
        plan: Plan,
        members: int,
    ) -> None:
        assert monitor.address is not None
        self._monitor = monitor
        self._snapshot_reader = snapshot_reader
        self._workers = workers
        self._plan = plan
        self.members = members
        self.address = monitor.address
        self._sizes = [end - begin for begin, end in pairwise(_ends(members, len(workers)))]
        self.size_of_last = self._sizes[-1]

    def ask(self, *command: object) -> list[Any]:
        """Send the same command to each process of members; return the answers in order."""
        return self.ask_each([command] * len(self._workers))

    def ask_each(self, commands: Sequence[Sequence[object]]) -> list[Any]:
        """Send each process of members its own command; return the answers in order."""
        for worker, command in zip(self._workers, commands, strict=True):
            worker.send(command, self._plan.patience_s)
        return [worker.receive() for worker in self._workers]

    def ask_last(self, *command: object) -> Any:
        """Send a command to the last process of members; return its answer."""
        return self._tell(self._workers[-1], *command)

    def snapshot(self) -> tuple[pb.Snapshot, float]:
        """Fetch the snapshot that a new watcher gets; return it and the seconds that it took."""
        began = time.monotonic()
        with channel(self.address) as link:
            call = monitor_pb2_grpc.MonitorServiceStub(link).Watch(
                pb.WatchRequest(knows_left=True, knows_models=True), timeout=_SNAPSHOT_S
            )
            snapshot = next(iter(call)).snapshot
            leave(call)
        return snapshot, time.monotonic() - began

    def watch(self, count: int) -> None:
        """Make `count` members watch from the current revision, as after a reconnect."""
        snapshot, _ = self.snapshot()
        self.ask_each([("watch", n, snapshot.revision, snapshot.life) for n in self.shares(count)])

    def fetch_snapshots(self, watchers: int) -> dict[str, Any]:
        """Measure the monitor while watchers connect at once for snapshots, and again and again.

        Returns the figures of `measure`, and those of the snapshots.
        """
        self._tell(self._snapshot_reader, "figures")
        self._tell(self._snapshot_reader, "fetch", watchers)
        try:
            found = self.measure(settle_s=0.0)
            fetched = self._tell(self._snapshot_reader, "figures")
        finally:
            self._tell(self._snapshot_reader, "fetch", 0)
        return found | {
            "watchers": watchers,
            "snapshots": fetched["snapshots"],
            "megabytes": figure(fetched["bytes"] / 1e6),
            "refused": fetched["ended"],
            "fetch_ms": percentiles_ms(fetched["fetch_us"]),
        }

    def _tell(self, worker: Worker, *command: object) -> Any:
        worker.send(command, self._plan.patience_s)
        return worker.receive()

    def shares(self, count: int) -> list[int]:
        """Split `count` members over the processes, up to the size of each."""
        shares: list[int] = []
        for left, size in zip(range(len(self._sizes), 0, -1), self._sizes, strict=True):
            shares.append(min(size, -(-(count - sum(shares)) // left)))
        return shares

    def measure(self, settle_s: float | None = None) -> dict[str, Any]:
        """Measure the monitor under the load of its members, after `settle_s` (by default the plan's)."""
        time.sleep(self._plan.settle_s if settle_s is None else settle_s)
        self.ask("figures")
        self._tell(self._monitor, "holds")
        began, ran_s = time.monotonic(), processor_s(self._monitor.pid)
        time.sleep(self._plan.seconds)
        found = self.ask("figures")
        holds = self._tell(self._monitor, "holds")
        ran_s = processor_s(self._monitor.pid) - ran_s
        took_s = time.monotonic() - began
        delays_us = [us for one in found for us in one["delays_us"]]
        total = {key: sum(one[key] for one in found) for key in found[0] if key != "delays_us"}
        turns = max(1, total["sent"] + total["late"])
        return {
            "cpu_cores": figure(ran_s / took_s),
            "cpu_us_per_heartbeat": figure(1e6 * ran_s / max(1, len(delays_us))),
            "rss_mb": self._rss_mb(),
            "heartbeats_per_s": figure(len(delays_us) / took_s),
            "taken": figure(min(1.0, len(delays_us) / turns)),
            "late": total["late"],
            "ended": total["ended"],
            "answer_ms": percentiles_ms(delays_us),
            "watched_per_s": figure(total["watched"] / took_s),
            "signs_per_s": figure(total["signs"] / took_s),
            "out_of_turn": total["gaps"],
            **holds,
        }

    def _rss_mb(self) -> float:
        status = Path(f"/proc/{self._monitor.pid}/status").read_text()
        return figure(int(status.partition("VmRSS:")[2].split()[0]) / 1024)


def _ends(members: int, processes: int) -> list[int]:
    """Split the members over the processes; return the boundaries."""
    return [members * n // processes for n in range(processes + 1)]


@contextmanager
def stage(plan: Plan, members: int) -> Iterator[Stage]:
    """Start a monitor with default settings, and processes of members that have not joined.

    Raises EaasError.
    """
    monitor = Worker("monitor", "benchmarks.monitor.monitor_process")
    try:
        wait_ready([monitor], _START_S)
        loaders = min(plan.loaders, members)
        ends = _ends(members, loaders)
        starts = [
            partial(
                Worker,
                f"members-{n}",
                "benchmarks.monitor.load_generator_process",
                address=monitor.address,
                numbers=ends[n : n + 2],
                lines=-(-(ends[n + 1] - ends[n]) // plan.per_connection),
                interval_s=plan.interval_s,
            )
            for n in range(loaders)
        ]
        starts.append(
            partial(
                Worker,
                "snapshots",
                "benchmarks.monitor.snapshot_process",
                address=monitor.address,
            )
        )
        with working(starts) as workers:
            yield Stage(monitor, workers[:-1], workers[-1], plan, members)
    except ClusterError as error:
        raise ClusterError(f"{error}; the monitor's: {monitor.last_words()}") from error
    finally:
        stop_all([monitor])


def percentiles_ms(delays_us: Sequence[int]) -> dict[str, float] | None:
    """p50, p99 and maximum of delays, converted to milliseconds; None without values."""
    if not delays_us:
        return None
    ordered = sorted(delays_us)
    places = {"p50": 0.5, "p99": 0.99, "max": 1.0}
    last = len(ordered) - 1
    return {name: figure(ordered[round(share * last)] / 1e3) for name, share in places.items()}
