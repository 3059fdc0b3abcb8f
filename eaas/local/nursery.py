"""Processes that share their imports: forked by one that has imported torch already."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from eaas.errors import ClusterError
from eaas.local.child import ENDED_VARIABLE
from eaas.local.process import ChildProcess, stop_all

__all__ = ["CLIENT_MODULES", "CONTROL_MODULES", "SERVER_MODULES", "Forked", "Nursery"]

CONTROL_MODULES = ("eaas.cli", "monitor.main", "balancer.main")
"""What a monitor and a balancer spend their start on."""
SERVER_MODULES = (
    "expert_server.main",
    "transformers.modeling_utils",
    "transformers.modeling_layers",
    "transformers.generation.utils",
)
"""What an expert server spends its start on: all but the first with the checkpoint's config."""
CLIENT_MODULES = (
    "attention_client.main",
    "attention_client.serve.batching",
    "attention_client.serve.sequential",
)
"""What an attention client spends its start on: one of the last two with the model."""

_ANSWER_BYTES = 1 << 12
# For a fork, or for the exit code of a process that has ended.
_ANSWER_S = 60.0
# Of a process whose nursery was killed before it told.
_UNKNOWN_CODE = 255


class Nursery(ChildProcess):
    """A process that forks others. It starts at once; from when it is ready on, forks take milliseconds.

    What is asked for before that is forked as soon as the module that it is importing is there. Its children
    end when it ends, as it ends with the launcher: nothing is left behind, whoever is killed.

    Args:
        modules: What it imports, in that order.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.settimeout(_ANSWER_S)
        self._environment = dict(os.environ)
        # An answer is that to the last request: one of them at a time.
        self._lock = threading.Lock()
        try:
            super().__init__(
                "nursery",
                [str(theirs.fileno()), *modules],
                None,
                module="eaas.local.nursery_process",
                pass_fds=(theirs.fileno(),),
            )
        except BaseException:
            self._control.close()
            raise
        finally:
            theirs.close()

    def fork(
        self,
        module: str,
        arguments: Sequence[str],
        log_fd: int,
        ready_fd: int,
        ended_pids: Sequence[int] = (),
    ) -> Forked:
        """Start `python -m module arguments`; the descriptors become the child's.

        It is told `ended_pids` (`ChildProcess`).

        Raises:
            ClusterError: The nursery has ended, or the system lets it fork no more.
        """
        changed = {
            name: os.environ.get(name)
            for name in self._environment.keys() | os.environ.keys()
            if self._environment.get(name) != os.environ.get(name)
        }
        changed[ENDED_VARIABLE] = " ".join(map(str, ended_pids))
        request = {"module": module, "arguments": list(arguments), "environment": changed}
        answer, fds = self._ask(request, (log_fd, ready_fd))
        return Forked(self, answer["pid"], fds[0])

    def exit_code(self, pid: int) -> int:
        """Of a process that has ended; to be asked once."""
        try:
            return int(self._ask({"reap": pid})[0]["code"])
        except ClusterError:
            return _UNKNOWN_CODE

    def end(self) -> None:
        """End it. Idempotent."""
        stop_all([self])

    def reap(self, timeout_s: float) -> bool:
        """Wait for the end; False if it has not come in time."""
        ended = super().reap(timeout_s)
        if ended:
            self._control.close()
        return ended

    def _ask(self, request: Any, fds: Sequence[int] = ()) -> tuple[Any, list[int]]:
        with self._lock:
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], fds)
                answer, returned, _, _ = socket.recv_fds(self._control, _ANSWER_BYTES, 1)
            except OSError as error:
                self._control.close()
                raise ClusterError(f"the nursery does not answer: {error}") from error
            except BaseException:
                # A late answer would be taken for that to a later request. Without its line it ends.
                self._control.close()
                raise
        if not answer:
            raise ClusterError(f"the nursery has ended; its last words: {self.last_words()}")
        document = json.loads(answer)
        if "error" in document:
            raise ClusterError(f"the nursery {document['error']}")
        return document, returned


class Forked:
    """A process that a nursery forked: as much of `subprocess.Popen` as a launcher needs.

    Attributes:
        pid: Process id; nobody else's until `returncode` is known.
        returncode: None until `poll` or `wait` have seen the end; 255 if the nursery was killed first.
    """

    def __init__(self, nursery: Nursery, pid: int, pidfd: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._nursery = nursery
        self._pidfd = pidfd
        weakref.finalize(self, os.close, pidfd)
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        """The exit code, negative for a signal, as of `Popen`; None while it runs."""
        return self._look(0.0)

    def wait(self, timeout: float) -> int:
        """Wait for the end. Raises subprocess.TimeoutExpired."""
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(self.pid), timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the end has been seen."""
        if self.poll() is None:
            # Not by its number: that may be another's by now.
            signal.pidfd_send_signal(self._pidfd, number)

    def _look(self, timeout_s: float) -> int | None:
        ended = _has_ended(self._pidfd, timeout_s)
        with self._reaping:
            if self.returncode is None and ended:
                self.returncode = self._nursery.exit_code(self.pid)
            return self.returncode


def _has_ended(pidfd: int, timeout_s: float) -> bool:
    # Not select(): a launcher may have more than 1024 descriptors.
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, timeout_s) * 1000))
