"""Processes that share their imports: forked by one that has imported torch already."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import subprocess
import threading
from collections.abc import Sequence
from typing import Any

from eaas.errors import ClusterError
from eaas.local.child import ENDED_VARIABLE
from eaas.local.pidfd import UNKNOWN_CODE, PidfdProcess
from eaas.local.process import ChildProcess, stop_all

__all__ = [
    "CLIENT_MODULES",
    "CONTROL_MODULES",
    "SERVER_MODULES",
    "Forked",
    "Nursery",
    "adopt_orphans",
]

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
# From its last line to its end.
_END_S = 3.0
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of a fork server's children when it ends: so their exit codes are known.

    Counts for the whole process, and for all its descendants.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


class Nursery(ChildProcess):
    """A fork server. It starts at once; from when it is ready on, forks take milliseconds.

    It forks what is asked for before that once the import at hand is done. It and its children end with the
    launcher; the children live on when it alone ends.

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
                "fork-server",
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
            ClusterError: The fork server has ended, or the system lets it fork no more.
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

    def exit_code(self, pid: int, pidfd: int) -> int:
        """Of a child that has ended; to be asked once. 255: nobody knows."""
        try:
            return int(self._ask({"reap": pid})[0]["code"])
        except ClusterError:
            return self._code_of_orphan(pidfd)

    def _code_of_orphan(self, pidfd: int) -> int:
        # Its children become this process's before its own end is seen, where `adopt_orphans` was called.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        try:
            ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        except ChildProcessError:
            return UNKNOWN_CODE
        assert ended is not None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

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
            except (BrokenPipeError, ConnectionResetError):
                answer = b""
            except OSError as error:
                self._control.close()
                raise ClusterError(f"the fork server does not answer: {error}") from error
            except BaseException:
                # A late answer would be taken for that to a later request. Without its line it ends.
                self._control.close()
                raise
        if not answer:
            raise ClusterError(f"the fork server has ended; its last words: {self.last_words()}")
        document = json.loads(answer)
        if "error" in document:
            raise ClusterError(f"the fork server {document['error']}")
        return document, returned


class Forked(PidfdProcess):
    """A process that a fork server forked; its pid is nobody else's until `returncode` is known."""

    def __init__(self, nursery: Nursery, pid: int, pidfd: int) -> None:
        super().__init__(pid, pidfd)
        self._nursery = nursery

    def exit_code(self) -> int:
        """Of the process, which has ended; called once."""
        return self._nursery.exit_code(self.pid, self.pidfd)
