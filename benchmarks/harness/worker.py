"""Worker processes of benchmarks, both ends: one line of JSON per command, one line per answer."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from eaas.errors import ClusterError
from eaas_cli.local.fork_server import ForkServer
from eaas_cli.local.process import ChildProcess, stop_all, wait_ready

__all__ = ["Worker", "commands_from", "processor_s", "working"]

_START_S = 120.0


class Worker(ChildProcess):
    """A benchmark's child process that executes commands, seen by the launcher.

    Args:
        module: Module to run; its main gets the arguments as one JSON object.
        fork_server: Forks the process. None: it is executed.
        arguments: Content of the object, with `control` added: the address for `commands_from`.
    """

    def __init__(
        self, name: str, module: str, fork_server: ForkServer | None = None, **arguments: object
    ) -> None:
        self._listener = socket.socket(socket.AF_UNIX)
        # Bind to an abstract address that the kernel chooses.
        self._listener.bind("")
        self._listener.listen(1)
        self._control: socket.socket | None = None
        control = self._listener.getsockname()[1:].decode()
        try:
            super().__init__(
                name,
                [json.dumps(arguments | {"control": control})],
                None,
                module=module,
                fork_server=fork_server,
            )
        except BaseException:
            self._listener.close()
            raise

    def send(self, command: object, timeout_s: float) -> None:
        """Send a command to the worker; `receive` then waits up to `timeout_s` for its answer."""
        if self._control is None:
            # A worker connects before it reports that it is ready.
            self._listener.settimeout(timeout_s)
            self._control = self._listener.accept()[0]
        self._control.settimeout(timeout_s)
        self._control.sendall(json.dumps(command).encode() + b"\n")

    def receive(self) -> Any:
        """Wait for the worker's answer to the last command. Raises ClusterError if none comes."""
        assert self._control is not None
        pieces: list[bytes] = []
        try:
            while not pieces or not pieces[-1].endswith(b"\n"):
                pieces.append(self._control.recv(1 << 20))
                if not pieces[-1]:
                    raise ClusterError(f"{self.name} ended; its last words: {self.last_words()}")
        except TimeoutError:
            raise ClusterError(
                f"{self.name} does not answer; its last words: {self.last_words()}"
            ) from None
        return json.loads(b"".join(pieces))

    def reap(self, timeout_s: float) -> bool:
        """Wait for the end of the worker and close its sockets; False on timeout."""
        ended = super().reap(timeout_s)
        if ended:
            self._listener.close()
            if self._control is not None:
                self._control.close()
        return ended


@contextmanager
def working(
    starts: Sequence[Callable[..., Worker]], fork_server: ForkServer | None = None
) -> Iterator[list[Worker]]:
    """Start a benchmark's workers; end them at the end of the block.

    Args:
        starts: `Worker` with all of its arguments except the fork server.
        fork_server: Forks the workers. None: they are executed.

    Raises:
        EaasError: A worker did not start (its message).
    """
    workers: list[Worker] = []
    try:
        for start in starts:
            workers.append(start(fork_server=fork_server))
        wait_ready(workers, _START_S)
        yield workers
    finally:
        stop_all(workers)


def commands_from(control: str) -> Iterator[tuple[Any, Callable[[object], None]]]:
    """In the worker: connect to the launcher, then yield each command with a function that answers it."""
    line = socket.socket(socket.AF_UNIX)
    line.connect("\0" + control)

    def reply(answer: object) -> None:
        line.sendall(json.dumps(answer).encode() + b"\n")

    def commands() -> Iterator[tuple[Any, Callable[[object], None]]]:
        with line, line.makefile("r") as lines:
            for text in lines:
                yield json.loads(text), reply

    return commands()


def processor_s(pid: int) -> float:
    """Processor seconds that a process has used, including its ended threads."""
    # The clock id of clock_getcpuclockid(3).
    return time.clock_gettime((~pid << 3) | 2)
