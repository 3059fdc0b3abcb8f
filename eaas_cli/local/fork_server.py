"""The launcher's handle on the fork server, which imports torch once and forks the roles' processes."""

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
from eaas.launcher_pipe import ENDED_VARIABLE
from eaas_cli.local.pidfd import UNKNOWN_CODE, PidfdProcess
from eaas_cli.local.process import ChildProcess, stop_all

__all__ = [
    "CLIENT_MODULES",
    "CONTROL_MODULES",
    "SERVER_MODULES",
    "ForkServer",
    "Forked",
    "start_fork_server",
]

CONTROL_MODULES = ("eaas_cli.commands", "monitor.main", "balancer.main")
"""Modules that the fork server imports for a monitor and a balancer."""
SERVER_MODULES = (
    "eaas_cli.commands",
    "expert_server.main",
    "transformers",
    # torch imports it to construct a model without memory.
    "torch.fx.experimental.symbolic_shapes",
)
"""Modules that it imports for an expert server, with those of the checkpoint's config."""
CLIENT_MODULES = (
    "attention_client.main",
    "attention_client.generation.batching",
    "attention_client.generation.sequential",
)
"""Modules that it imports for an attention client. A model needs only one of the last two."""

_ANSWER_BYTES = 1 << 12
# Deadline of the fork server's answer to a request.
_ANSWER_S = 60.0
# Deadline from its last message to its end.
_END_S = 3.0
_PR_SET_CHILD_SUBREAPER = 36


def start_fork_server(*, with_client: bool) -> ForkServer:
    """Start the fork server of a cluster, with or without an embedded attention client.

    This process becomes the parent of its children once it has ended, for their exit codes. That applies to
    the whole process and all its descendants.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")
    return ForkServer(SERVER_MODULES, CLIENT_MODULES if with_client else ())


class ForkServer(ChildProcess):
    """The launcher's handle on a fork server. It starts at once; once it is ready, a fork takes milliseconds.

    Requests before that wait for the imports. The fork server and its children end with the launcher;
    the children survive the end of the fork server.

    Args:
        modules: What it imports before it is ready.
        later: What it imports then, between requests; the fork of an attention client waits for it.

    Attributes:
        control: Socket of the requests, of which one runs at a time.
    """

    def __init__(self, modules: Sequence[str], later: Sequence[str] = ()) -> None:
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control.settimeout(_ANSWER_S)
        self._environment = dict(os.environ)
        # One request runs at a time, because answers have no ids.
        self._lock = threading.Lock()
        try:
            super().__init__(
                "fork-server",
                [str(theirs.fileno()), " ".join(modules), " ".join(later)],
                None,
                module="eaas_cli.local.fork_server_process",
                pass_fds=(theirs.fileno(),),
            )
        except BaseException:
            self.control.close()
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
        """Have `python -m module arguments` forked with these descriptors and this process's environment.

        `ended_pids`: as in `ChildProcess`, which calls this.

        Raises ClusterError: the fork server has ended, or the system refuses the fork.
        """
        changed = {
            name: os.environ.get(name)
            for name in self._environment.keys() | os.environ.keys()
            if self._environment.get(name) != os.environ.get(name)
        }
        changed[ENDED_VARIABLE] = " ".join(map(str, ended_pids))
        request = {
            "module": module,
            "arguments": list(arguments),
            "environment": changed,
            "needs_all": "attention-client" in arguments[:1],
        }
        answer, fds = self._ask(request, (log_fd, ready_fd))
        return Forked(self, answer["pid"], fds[0])

    def exit_code(self, pid: int, pidfd: int) -> int:
        """Get the exit code of a forked process that has ended; call it once. 255 if unknown.

        The launcher reads it itself if the fork server has ended.
        """
        try:
            return int(self._ask({"reap": pid})[0]["code"])
        except ClusterError:
            return self._code_of_orphan(pidfd)

    def _code_of_orphan(self, pidfd: int) -> int:
        # After `start_fork_server`, its children become this process's before its own end is visible.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_S)
        try:
            ended = os.waitid(os.P_PIDFD, pidfd, os.WEXITED)
        except ChildProcessError:
            return UNKNOWN_CODE
        assert ended is not None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def end(self) -> None:
        """End the fork server; the processes that it forked continue. Idempotent."""
        stop_all([self])

    def reap(self, timeout_s: float) -> bool:
        """Wait for the end of the fork server and close its socket; False on timeout."""
        ended = super().reap(timeout_s)
        if ended:
            self.control.close()
        return ended

    def _ask(self, request: Any, fds: Sequence[int] = ()) -> tuple[Any, list[int]]:
        with self._lock:
            try:
                socket.send_fds(self.control, [json.dumps(request).encode()], fds)
                answer, returned, _, _ = socket.recv_fds(self.control, _ANSWER_BYTES, 1)
            except (BrokenPipeError, ConnectionResetError):
                answer = b""
            except OSError as error:
                self.control.close()
                raise ClusterError(f"the fork server does not answer: {error}") from error
            except BaseException:
                # A late answer would be read as the next one. Closing the socket ends the process.
                self.control.close()
                raise
        if not answer:
            raise ClusterError(f"the fork server has ended; its last words: {self.last_words()}")
        document = json.loads(answer)
        if "error" in document:
            raise ClusterError(f"the fork server {document['error']}")
        return document, returned


class Forked(PidfdProcess):
    """A process that the fork server forked. Its pid is not reused until the launcher knows `returncode`."""

    def __init__(self, fork_server: ForkServer, pid: int, pidfd: int) -> None:
        super().__init__(pid, pidfd)
        self._fork_server = fork_server

    def exit_code(self) -> int:
        """Get the exit code of the process, which has ended, from the fork server; call it once."""
        return self._fork_server.exit_code(self.pid, self.pidfd)
