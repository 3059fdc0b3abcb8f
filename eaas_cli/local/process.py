"""The launcher's handle on one child process: its start, announcements, log and end."""

from __future__ import annotations

import functools
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import IO, Protocol

from eaas.errors import ClusterError, ConfigError, EaasError
from eaas.launcher_pipe import ENDED_VARIABLE, LAUNCHER_VARIABLE, READY_VARIABLE
from eaas_cli.local.interrupt import Interrupt
from eaas_cli.local.pidfd import PidfdProcess

__all__ = [
    "ChildProcess",
    "Forks",
    "how_it_ended",
    "lifeline",
    "program",
    "stop_all",
    "wait_ready",
]

_TAIL_BYTES = 4096
# Grace period after SIGTERM. It may pass three times: for the client, the servers and the monitor.
_END_S = 3.0
_POLL_S = 0.5


def program() -> tuple[str, ...]:
    """The command that runs this installation's `eaas` from any directory, as words, for printed commands."""
    script = Path(sys.executable).with_name("eaas")
    return (str(script),) if script.exists() else (sys.executable, "-m", "eaas_cli")


def how_it_ended(code: int | None) -> str:
    """Describe how a process ended, from the exit code of `subprocess.Popen`, for a message."""
    if code is not None and code < 0:
        return f"was ended by {signal.Signals(-code).name}"
    return f"ended with code {code}"


@functools.cache
def lifeline(_launcher: int) -> int:
    """Read end of a pipe that tells children when the launcher ends, because only it holds the write end.

    Cached per pid, because a forked launcher needs its own pipe.
    """
    read_fd, _ = os.pipe()
    return read_fd


def _open_log(log_dir: Path | None, name: str) -> IO[bytes]:
    try:
        if log_dir is None:
            return tempfile.TemporaryFile()
        return (log_dir / f"{name}.log").open("ab+")
    except OSError as error:
        raise ConfigError(
            f"the log of {name}: {error}; give another directory with --log-dir"
        ) from error


class Forks(Protocol):
    """What forks processes: a `ForkServer`."""

    def fork(
        self,
        module: str,
        arguments: Sequence[str],
        log_fd: int,
        ready_fd: int,
        ended_pids: Sequence[int] = (),
    ) -> PidfdProcess:
        """Fork `python -m module arguments`, with its log and the pipe of its announcements."""


class ChildProcess:
    """A child process of the launcher: a role, the fork server or part of a benchmark.

    It starts at once; `wait_ready` waits until it serves, and `stop_all` ends it.

    Args:
        name: Name of the member and of its log file.
        arguments: Arguments of the `eaas` program; `cluster` fixes the port in them for a restart.
        log_dir: Directory of the log. None: an unnamed temporary file.
        module: Python module to run.
        pass_fds: Descriptors that the child inherits, under the same numbers.
        fork_server: Forks the process, which is fast. None: it is executed.
        ended_pids: Former processes of this name that have ended.

    Raises:
        ConfigError: The log cannot be written.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        log_dir: Path | None,
        module: str = "eaas_cli",
        pass_fds: Sequence[int] = (),
        fork_server: Forks | None = None,
        ended_pids: Sequence[int] = (),
    ) -> None:
        self.name = name
        self.ended_pids = tuple(ended_pids)
        self.arguments = tuple(arguments)
        # Closed by `reap`.
        self._log = _open_log(log_dir, name)
        self.address: str | None = None
        # The kernel that an expert server announced.
        self.kernel: str | None = None
        self._failure: str | None = None
        self._pending = b""
        self.fd, write_fd = os.pipe()
        os.set_blocking(self.fd, False)
        self.process: subprocess.Popen[bytes] | PidfdProcess
        try:
            if fork_server is None:
                self.process = self._execute(module, write_fd, pass_fds)
            else:
                fds = self._log.fileno(), write_fd
                self.process = fork_server.fork(module, self.arguments, *fds, self.ended_pids)
        except BaseException:
            os.close(self.fd)
            self._log.close()
            raise
        finally:
            os.close(write_fd)

    def _execute(
        self, module: str, ready_fd: int, pass_fds: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        alive_fd = lifeline(os.getpid())
        return subprocess.Popen(
            [sys.executable, "-m", module, *self.arguments],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=os.environ
            | {
                READY_VARIABLE: str(ready_fd),
                LAUNCHER_VARIABLE: str(alive_fd),
                ENDED_VARIABLE: " ".join(map(str, self.ended_pids)),
            },
            pass_fds=(ready_fd, alive_fd, *pass_fds),
            # In its own process group, the child gets no Ctrl-C: the launcher gets it and ends the child.
            process_group=0,
        )

    @property
    def pid(self) -> int:
        """Process id of the child."""
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether the process has not ended. It may still be starting."""
        return self.process.poll() is None

    def read(self) -> None:
        """Read what the child has announced by now (address, kernel); never waits.

        Raises EaasError: the child announced a failure (its message), or ended before it was ready.
        """
        try:
            while chunk := os.read(self.fd, 65_536):
                self._pending += chunk
        except BlockingIOError:
            pass
        *lines, self._pending = self._pending.split(b"\n")
        for line in lines:
            fact = json.loads(line)
            self.address = fact.get("ready", self.address)
            self.kernel = fact.get("kernel", self.kernel)
            self._failure = fact.get("error", self._failure)
        if self._failure is not None:
            raise EaasError(self._failure)
        if self.address is None and not self.running:
            raise ClusterError(
                f"{self.name} {how_it_ended(self.process.returncode)} before it was ready; "
                f"its last words: {self.last_words()}"
            )

    def last_words(self) -> str:
        """The last line of the child's log, for an error message about it."""
        size = os.fstat(self._log.fileno()).st_size
        # pread, because the child shares the file offset.
        tail = os.pread(self._log.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        lines = tail.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else "(nothing)"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child, unless it has ended."""
        if self.running:
            self.process.send_signal(number)

    def end(self) -> None:
        """End the child at once, an expert server without draining."""
        stop_all([self], at_once=True)

    def reap(self, timeout_s: float) -> bool:
        """Wait for the end of the child and close its log; False on timeout. Sends no signal."""
        try:
            self.process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            return False
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._log.close()
        return True


def stop_all(
    children: Iterable[ChildProcess], *, at_once: bool = False, grace_s: float = _END_S
) -> None:
    """End child processes: SIGTERM to all, then SIGKILL after a grace period. Idempotent.

    Args:
        children: The processes.
        at_once: Send a second signal, which makes expert servers leave without draining.
        grace_s: The grace period.
    """
    ending = list(children)
    deadline = time.monotonic() + grace_s
    for child in ending:
        child.signal(signal.SIGCONT)
        if at_once:
            # The two signals differ, because a pending signal absorbs another of the same number.
            child.signal(signal.SIGINT)
        child.signal(signal.SIGTERM)
    for child in ending:
        if not child.reap(deadline - time.monotonic()):
            child.signal(signal.SIGKILL)
            child.reap(_END_S)


def wait_ready(
    children: Iterable[ChildProcess],
    timeout_s: float,
    interrupt: Interrupt | None = None,
    needed: Iterable[ChildProcess] = (),
    on_wait: Callable[[], None] = lambda: None,
) -> None:
    """Wait until every child process has announced its address. After an error the others still run.

    Args:
        needed: Ready processes that the others depend on.
        on_wait: Called at least twice a second while waiting.

    Raises:
        EaasError: A child failed (its message), or a ready one has ended.
        ClusterError: Timeout; names the processes that are not ready.
        Interrupted: A signal came.
    """
    deadline = time.monotonic() + timeout_s
    started = [*children, *needed]
    waiting = {child for child in started if child.address is None}
    with selectors.DefaultSelector() as selector:
        for child in waiting:
            selector.register(child.fd, selectors.EVENT_READ, child)
        if interrupt is not None:
            interrupt.check()
            selector.register(interrupt.fd, selectors.EVENT_READ, interrupt)
        while waiting:
            left = deadline - time.monotonic()
            if left <= 0:
                names = ", ".join(sorted(child.name for child in waiting))
                raise ClusterError(f"not ready after {timeout_s:.0f} s: {names}")
            for child in started:
                if child not in waiting and not child.running:
                    raise ClusterError(
                        f"{child.name} {how_it_ended(child.process.returncode)} while others were "
                        f"starting; its last words: {child.last_words()}"
                    )
            for key, _ in selector.select(min(left, _POLL_S)):
                if isinstance(key.data, Interrupt):
                    key.data.check()
                    continue
                child = key.data
                child.read()
                if child.address is not None:
                    selector.unregister(child.fd)
                    waiting.discard(child)
            on_wait()
