"""A process of simulated members: `python -m benchmarks.monitor.load_generator_process JSON`.

Commands, one line of JSON each, answered when done:

    join                                        seconds
    watch     [count, revision, life]           null
    vanish    [place, goodbye]                  {id, incarnation, at}
    revive    place                             null, once it is registered again
    seen      [id, incarnation, count, wait_s]  {count, first, last}, once `count` watchers saw it or after
                                                `wait_s`
    figures                                     `LoadGenerators.take_figures`
"""

from __future__ import annotations

import json
import resource
import selectors
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from benchmarks.monitor.line import Line
from benchmarks.monitor.load_generators import LoadGenerators
from eaas.launcher_pipe import announce, bind_to_launcher
from eaas.log import configure_logging

__all__ = ["main"]


def main(arguments: str) -> None:
    """Simulate members until the launcher closes `control`. Arguments as in `LoadGenerators`."""
    bind_to_launcher()
    configure_logging("bench-members")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    wanted: dict[str, Any] = json.loads(arguments)
    with socket.socket(socket.AF_UNIX) as control, selectors.DefaultSelector() as selector:
        control.connect("\0" + wanted["control"])
        load_generators = LoadGenerators(
            wanted["address"],
            range(*wanted["numbers"]),
            wanted["lines"],
            wanted["interval_s"],
            selector,
        )
        selector.register(control, selectors.EVENT_READ)
        announce(ready=wanted["address"])
        _CommandLoop(load_generators, control, selector).run()


class _CommandLoop:
    """Runs the members and the launcher's commands in one loop."""

    def __init__(
        self,
        load_generators: LoadGenerators,
        control: socket.socket,
        selector: selectors.BaseSelector,
    ) -> None:
        self._load_generators = load_generators
        self._control = control
        self._selector = selector
        self._pending = b""
        # Polls the running command: returns its answer in a list, or an empty list if it still runs.
        self._done: Callable[[], list[Any]] | None = None

    def run(self) -> None:
        while True:
            wait_s = self._load_generators.turn(time.monotonic())
            for key, _ in self._selector.select(min(wait_s, 0.02)):
                if isinstance(key.data, Line):
                    self._load_generators.ready(key.data)
                elif not self._listen():
                    self._load_generators.close()
                    return
            if self._done is not None and (answer := self._done()):
                self._done = None
                self._control.sendall(json.dumps(answer[0]).encode() + b"\n")

    def _listen(self) -> bool:
        """Read the launcher's commands and begin them; False once the launcher has closed the connection."""
        data = self._control.recv(65_536)
        self._pending += data
        *lines, self._pending = self._pending.split(b"\n")
        for line in lines:
            self._done = self._begin(*json.loads(line))
        return bool(data)

    def _begin(self, command: str, *words: Any) -> Callable[[], list[Any]]:
        """Begin a launcher's command; the result polls it: the answer in a list, or an empty list."""
        load_generators, began = self._load_generators, time.monotonic()
        if command == "join":
            load_generators.join()
            return lambda: [time.monotonic() - began] if load_generators.joined else []
        if command == "revive":
            load_generators.revive(words[0])
            return lambda: [None] if load_generators.joined else []
        if command == "seen":
            member_id, incarnation, count, wait_s = words

            def seen() -> list[Any]:
                found = load_generators.seen(member_id, incarnation)
                over = time.monotonic() - began >= wait_s
                return [found] if found["count"] >= count or over else []

            return seen
        answer: dict[str, Any] | None = None
        if command == "vanish":
            answer = load_generators.vanish(words[0], goodbye=words[1])
        elif command == "figures":
            answer = load_generators.take_figures()
        else:
            load_generators.watch(*words)
        return lambda: [answer]


if __name__ == "__main__":
    main(sys.argv[1])
