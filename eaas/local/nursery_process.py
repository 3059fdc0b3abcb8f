"""`python -m eaas.local.nursery_process FD MODULE...`: imports once, then forks a process per request.

See `eaas.local.nursery` for the launcher's side, and ADR 0012 for why.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
from collections.abc import Sequence

import numpy as np

from eaas import cli
from eaas.local.child import PARENT_VARIABLE, READY_VARIABLE, announce, bind_to_launcher
from eaas.local.command_line import set_command_line

__all__ = ["main"]

_REQUEST_BYTES = 1 << 20


def main() -> None:
    """Serve the launcher until it closes the line; in each forked process, be the `eaas` program."""
    bind_to_launcher()
    # Read when transformers is imported: no role ever fetches anything.
    os.environ["HF_HUB_OFFLINE"] = "1"
    control = socket.socket(fileno=int(sys.argv[1]))
    for module in sys.argv[2:]:
        importlib.import_module(module)
    # What is there by now stays for ever. A collector that looked at it in each child would copy its pages.
    gc.freeze()
    announce(ready="")
    # Not for the children.
    os.close(int(os.environ.pop(READY_VARIABLE)))
    arguments = _serve(control)
    if arguments is not None:
        sys.argv[:] = ["eaas", *arguments]
        cli.main()


def _serve(control: socket.socket) -> Sequence[str] | None:
    """Answer requests. Returns the arguments in a child that is to run with them; None at the end."""
    while True:
        message, fds, _, _ = socket.recv_fds(control, _REQUEST_BYTES, 2)
        if not message:
            return None
        request = json.loads(message)
        if "reap" in request:
            _, status = os.waitpid(request["reap"], 0)
            answer = {"code": os.waitstatus_to_exitcode(status)}
            control.send(json.dumps(answer).encode())
            continue
        log_fd, ready_fd = fds
        nursery = os.getpid()
        pid = os.fork()
        if pid == 0:
            control.close()
            _become(request["arguments"], request["environment"], nursery, log_fd, ready_fd)
            return list(request["arguments"])
        # Nobody else reaps: until the launcher asks for its exit code, the pid is this process's.
        pidfd = os.pidfd_open(pid)
        socket.send_fds(control, [json.dumps({"pid": pid}).encode()], [pidfd])
        for fd in (log_fd, ready_fd, pidfd):
            os.close(fd)


def _become(
    arguments: Sequence[str],
    environment: dict[str, str | None],
    nursery: int,
    log_fd: int,
    ready_fd: int,
) -> None:
    """Make a forked process what `Popen` would have made it."""
    os.setpgid(0, 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(log_fd)
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.environ |= {READY_VARIABLE: str(ready_fd), PARENT_VARIABLE: str(nursery)}
    # Python's own generator is seeded anew by itself. torch's has the same seed in each process anyway.
    np.random.seed()
    words = [sys.executable, "-m", "eaas", *arguments]
    try:
        set_command_line(words)
    except OSError:
        # Who looks for a process must find it: rather start the slow way.
        os.set_inheritable(ready_fd, True)
        os.execv(words[0], words)


if __name__ == "__main__":
    main()
