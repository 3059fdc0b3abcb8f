"""Watchers that fetch snapshots: `python -m benchmarks.monitor.snapshot_process JSON`.

All watchers begin together. Each connects, receives a snapshot, closes its connection, and begins anew.

Commands, one line of JSON each, answered at once:

    fetch     count      null; 0 stops all
    figures              {snapshots, bytes, ended, fetch_us}: since the last time; `ended` are streams that
                         the monitor ended, `fetch_us` the times from a connection to its snapshot
"""

from __future__ import annotations

import json
import resource
import selectors
import socket
import sys
import time
from typing import Any

from benchmarks.monitor.line import Call, Line
from eaas.launcher_pipe import announce, bind_to_launcher
from eaas.log import configure_logging
from eaas.rpc.v1 import monitor_pb2 as pb

__all__ = ["SnapshotReaders", "main"]

_REQUEST = pb.WatchRequest(
    knows_left=True, knows_models=True, heartbeats_tell=True
).SerializeToString()
_SELECT_S = 0.05


class SnapshotReaders:
    """Watchers that reconnect for a snapshot again and again, in one thread."""

    def __init__(self, address: str, selector: selectors.BaseSelector) -> None:
        self._address = address
        self._selector = selector
        self._begun: dict[Line, float] = {}
        self._got: dict[Line, int] = {}
        self._ended_lines: set[Line] = set()
        self._snapshots = self._bytes = self._ended = 0
        self._fetch_us: list[int] = []

    def fetch(self, count: int) -> None:
        """Let this many watchers fetch snapshots from now on, in place of those before."""
        for line in tuple(self._begun):
            self._close(line)
        for _ in range(count):
            self._open()

    def ready(self, line: Line) -> None:
        """Read from a watcher's connection, and send what it owes; once it has its snapshot, begin anew."""
        line.pump()
        line.flush()
        if line in self._ended_lines:
            self._ended += 1
        elif size := self._got.get(line):
            self._snapshots += 1
            self._bytes += size
            self._fetch_us.append(round(1e6 * (time.monotonic() - self._begun[line])))
        else:
            return
        self._close(line)
        self._open()

    def take_figures(self) -> dict[str, Any]:
        """Return the counters since the last call, and reset them."""
        found = {
            "snapshots": self._snapshots,
            "bytes": self._bytes,
            "ended": self._ended,
            "fetch_us": self._fetch_us,
        }
        self._snapshots = self._bytes = self._ended = 0
        self._fetch_us = []
        return found

    def _open(self) -> None:
        line = Line(self._address)
        self._begun[line] = time.monotonic()

        # Only the size is used, because parsing would cost more processor time than the monitor's work.
        def answered(message: bytes) -> None:
            self._got.setdefault(line, len(message))

        line.call("Watch", _REQUEST, Call(answered, lambda: self._ended_lines.add(line)))
        line.flush()
        self._selector.register(line, selectors.EVENT_READ, line)

    def _close(self, line: Line) -> None:
        self._selector.unregister(line)
        line.close()
        del self._begun[line]
        self._got.pop(line, None)
        self._ended_lines.discard(line)


def main(arguments: str) -> None:
    """Fetch snapshots until the launcher closes `control`."""
    bind_to_launcher()
    configure_logging("bench-snapshots")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    wanted: dict[str, Any] = json.loads(arguments)
    with socket.socket(socket.AF_UNIX) as control, selectors.DefaultSelector() as selector:
        control.connect("\0" + wanted["control"])
        readers = SnapshotReaders(wanted["address"], selector)
        selector.register(control, selectors.EVENT_READ)
        announce(ready=wanted["address"])
        pending = b""
        while True:
            for key, _ in selector.select(_SELECT_S):
                if isinstance(key.data, Line):
                    readers.ready(key.data)
                    continue
                data = control.recv(65_536)
                if not data:
                    return
                *commands, pending = (pending + data).split(b"\n")
                for command in commands:
                    name, *words = json.loads(command)
                    answer = None
                    if name == "figures":
                        answer = readers.take_figures()
                    else:
                        readers.fetch(*words)
                    control.sendall(json.dumps(answer).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1])
