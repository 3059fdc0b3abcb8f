"""vLLM's processes end with `eaas vllm`, even if it is killed.

The kernel tells vLLM's API server (`start`), which then stops its children. If it cannot, each process of
vLLM kills itself after a grace period: a thread of the plugin waits for the end of `eaas vllm`.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time

from eaas.net.server_records import started_at

__all__ = ["SUPERVISOR_VARIABLE", "end_with_supervisor", "stop_engine", "supervisor_text"]

SUPERVISOR_VARIABLE = "_EAAS_VLLM_SUPERVISOR"
"""Pid of `eaas vllm` and its start time, in the environment of vLLM's processes."""
# Time for vLLM's own orderly end.
_GRACE_S = 6.0
_watched = False


def supervisor_text() -> str:
    """Value of SUPERVISOR_VARIABLE for the processes that this one starts."""
    return f"{os.getpid()} {started_at(os.getpid())}"


def end_with_supervisor() -> None:
    """Kill this process soon after `eaas vllm` has ended. Does nothing if vLLM was started by hand."""
    global _watched
    if _watched or SUPERVISOR_VARIABLE not in os.environ:
        return
    _watched = True
    _watch()
    # Threads do not survive a fork.
    os.register_at_fork(after_in_child=_watch)


def stop_engine() -> None:
    """End vLLM, from one of its worker processes: the operator stops the cluster."""
    supervisor = _supervisor()
    # Without `eaas vllm`, vLLM ends when its worker does.
    os.kill(os.getpid() if supervisor is None else supervisor, signal.SIGTERM)


def _supervisor() -> int | None:
    pid, _, started = os.environ.get(SUPERVISOR_VARIABLE, "").partition(" ")
    if not pid or started_at(int(pid)) != int(started):
        return None
    return int(pid)


def _watch() -> None:
    threading.Thread(target=_wait, name="eaas-lifeline", daemon=True).start()


def _wait() -> None:
    pid = _supervisor()
    if pid is not None:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            pass
        else:
            poll = select.poll()
            poll.register(pidfd, select.POLLIN)
            poll.poll()
            os.close(pidfd)
    time.sleep(_GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)
