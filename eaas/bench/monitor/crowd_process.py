"""A process of simulated members: `python -m eaas.bench.monitor.crowd_process JSON`.

Commands, one line of JSON each; each is answered once it is done:

    join                                        seconds it took
    watch     [count, revision, life]           null
    vanish    [place, goodbye]                  {id, incarnation, at}
    revive    place                             null, once it is registered again
    seen      [id, incarnation, count, wait_s]  {count, first, last}: when so many watchers know, or the time
                                                is over
    figures                                     `Crowd.take_figures`
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

from eaas.bench.monitor.crowd import Crowd
from eaas.bench.monitor.line import Line
from eaas.local.child import announce, bind_to_launcher
from eaas.log import configure_logging

__all__ = ["main"]


def main(arguments: str) -> None:
    """Be members until the launcher ends the line; arguments: `Crowd`'s, with `control`."""
    bind_to_launcher()
    configure_logging("bench-members")
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    wanted: dict[str, Any] = json.loads(arguments)
    with socket.socket(socket.AF_UNIX) as control, selectors.DefaultSelector() as selector:
        control.connect("\0" + wanted["control"])
        crowd = Crowd(
            wanted["address"],
            range(*wanted["numbers"]),
            wanted["lines"],
            wanted["interval_s"],
            selector,
        )
        selector.register(control, selectors.EVENT_READ)
        announce(ready=wanted["address"])
        _Obedience(crowd, control, selector).run()


class _Obedience:
    """Turns of the crowd, with a look at the launcher's line in between."""

    def __init__(
        self, crowd: Crowd, control: socket.socket, selector: selectors.BaseSelector
    ) -> None:
        self._crowd = crowd
        self._control = control
        self._selector = selector
        self._pending = b""
        # Of the command that is not done: what it answers, None while it is not.
        self._done: Callable[[], list[Any]] | None = None
        self._began = False

    def run(self) -> None:
        while True:
            wait_s = self._crowd.turn(time.monotonic())
            for key, _ in self._selector.select(min(wait_s, 0.02)):
                if isinstance(key.data, Line):
                    self._crowd.ready(key.data)
                elif not self._listen():
                    self._crowd.close()
                    return
            if self._done is not None and (answer := self._done()):
                self._done = None
                self._control.sendall(json.dumps(answer[0]).encode() + b"\n")

    def _listen(self) -> bool:
        """Takes what the launcher says; False once it has gone."""
        data = self._control.recv(65_536)
        self._pending += data
        *lines, self._pending = self._pending.split(b"\n")
        for line in lines:
            self._done = self._obey(*json.loads(line))
        return bool(data)

    def _obey(self, command: str, *words: Any) -> Callable[[], list[Any]]:
        """Begins a command; what it returns gives the answer, in a list, or nothing yet."""
        crowd, began = self._crowd, time.monotonic()
        if command == "join":
            crowd.join()
            return lambda: [time.monotonic() - began] if crowd.joined else []
        if command == "revive":
            crowd.revive(words[0])
            return lambda: [None] if crowd.joined else []
        if command == "seen":
            member_id, incarnation, count, wait_s = words

            def seen() -> list[Any]:
                found = crowd.seen(member_id, incarnation)
                over = time.monotonic() - began >= wait_s
                return [found] if found["count"] >= count or over else []

            return seen
        answer: dict[str, Any] | None = None
        if command == "vanish":
            answer = crowd.vanish(words[0], goodbye=words[1])
        elif command == "figures":
            answer = crowd.take_figures()
        else:
            crowd.watch(*words)
        return lambda: [answer]


if __name__ == "__main__":
    main(sys.argv[1])
