"""Processes of the benchmark that take commands: one line of JSON to the child, one line back.

A child is a `ChildProcess`: it says when it is ready, ends with its launcher, and its last words are kept.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from eaas.errors import ClusterError
from eaas.local.interrupt import Interrupt
from eaas.local.nursery import Nursery
from eaas.local.process import ChildProcess, stop_all, wait_ready

__all__ = ["Worker", "nursing", "obey", "working"]

_START_S = 120.0


class Worker(ChildProcess):
    """A child, with a line to it.

    Args:
        name: For people.
        module: Its full name; its main gets the arguments as one JSON object.
        nursery: Forks it. By default it is executed.
        arguments: What the object holds, beside `control`: where the child is to call.
    """

    def __init__(
        self, name: str, module: str, nursery: Nursery | None = None, **arguments: object
    ) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        # Nameless in the file system: the kernel chooses an address that goes with the socket.
        self._listener.bind("")
        self._listener.listen(1)
        self._line: socket.socket | None = None
        control = self._listener.getsockname()[1:].decode()
        try:
            super().__init__(
                name,
                [json.dumps(arguments | {"control": control})],
                None,
                module=module,
                nursery=nursery,
            )
        except BaseException:
            self._listener.close()
            raise

    def tell(self, command: object, timeout_s: float) -> None:
        """Send a command; the answer is to be there so many seconds later."""
        if self._line is None:
            # A child that is ready has called before.
            self._listener.settimeout(timeout_s)
            self._line = self._listener.accept()[0]
        self._line.settimeout(timeout_s)
        self._line.sendall(json.dumps(command).encode() + b"\n")

    def hear(self) -> Any:
        """The answer to the last command.

        Raises:
            ClusterError: None came; with the child's last words.
        """
        assert self._line is not None
        pieces: list[bytes] = []
        try:
            while not pieces or not pieces[-1].endswith(b"\n"):
                pieces.append(self._line.recv(1 << 20))
                if not pieces[-1]:
                    raise ClusterError(f"{self.name} ended; its last words: {self.last_words()}")
        except TimeoutError:
            raise ClusterError(
                f"{self.name} does not answer; its last words: {self.last_words()}"
            ) from None
        return json.loads(b"".join(pieces))

    def reap(self, timeout_s: float) -> bool:
        """Wait for the end; False if it has not come in time."""
        ended = super().reap(timeout_s)
        if ended:
            self._listener.close()
            if self._line is not None:
                self._line.close()
        return ended


@contextmanager
def nursing(
    modules: Sequence[str], nursery: Nursery | None = None, interrupt: Interrupt | None = None
) -> Iterator[Nursery]:
    """A nursery that has imported what it needs, so that it takes nothing from what is measured next.

    Args:
        modules: What it imports.
        nursery: The caller's, to be taken in its place, and left running.
        interrupt: Ends the wait for it early.

    Raises:
        EaasError: It did not start.
        Interrupted: The operator wants the end.
    """
    if nursery is not None:
        yield nursery
        return
    own = Nursery(modules)
    try:
        wait_ready([own], _START_S, interrupt)
        yield own
    finally:
        own.end()


@contextmanager
def working(
    starts: Sequence[Callable[..., Worker]], nursery: Nursery | None = None
) -> Iterator[list[Worker]]:
    """Start workers, and end them afterwards, whatever happens.

    Args:
        starts: `Worker`, with all of its arguments but the nursery.
        nursery: Forks them. By default they are executed.

    Raises:
        EaasError: One did not start; its own words.
    """
    workers: list[Worker] = []
    try:
        for start in starts:
            workers.append(start(nursery=nursery))
        wait_ready(workers, _START_S)
        yield workers
    finally:
        stop_all(workers)


def obey(control: str) -> Iterator[tuple[Any, Callable[[object], None]]]:
    """The child's side: call the launcher, at once.

    Returns:
        The commands that come, each with a function that answers it.
    """
    line = socket.socket(socket.AF_UNIX)
    line.connect("\0" + control)

    def reply(answer: object) -> None:
        line.sendall(json.dumps(answer).encode() + b"\n")

    def commands() -> Iterator[tuple[Any, Callable[[object], None]]]:
        with line, line.makefile("r") as lines:
            for text in lines:
                yield json.loads(text), reply

    return commands()
