"""`python -m eaas.local.nursery_process FD MODULE...`: imports once, then forks a process per request.

See `eaas.local.nursery` for the launcher's side, and ADR 0012 for why.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import socket
import sys
from typing import Any

from eaas.local.child import READY_VARIABLE, announce, bind_to_launcher
from eaas.local.command_line import set_command_line

__all__ = ["main"]

_REQUEST_BYTES = 1 << 20


class _Born(Exception):
    """Raised in a forked process: leaves all that was the nursery's. Holds the request."""


def main() -> None:
    """Serve the launcher until it closes the line; in each forked process, be what it asked for."""
    bind_to_launcher()
    # Read when transformers is imported: no role ever fetches anything.
    os.environ["HF_HUB_OFFLINE"] = "1"
    control = socket.socket(fileno=int(sys.argv[1]))
    # Hardly anything that an import makes is garbage: looking for it takes a fourth of the time.
    gc.disable()
    try:
        for module in sys.argv[2:]:
            importlib.import_module(module)
            # A monitor need not wait until the rest is there.
            while select.select([control], [], [], 0)[0]:
                _serve(control)
        # What is there by now stays. A collector that looked at it in each child would copy its pages.
        gc.freeze()
        gc.enable()
        announce(ready="")
        while True:
            _serve(control)
    except _Born as born:
        (request,) = born.args
    # Outside of the block, so that the child's own errors do not name this one as their context.
    sys.argv[:] = [request["module"], *request["arguments"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _serve(control: socket.socket) -> None:
    """Answer a request. Raises _Born in a child; SystemExit when the launcher has closed the line."""
    message, fds, _, _ = socket.recv_fds(control, _REQUEST_BYTES, 2)
    if not message:
        sys.exit()
    request = json.loads(message)
    if "reap" in request:
        _, status = os.waitpid(request["reap"], 0)
        answer: dict[str, object] = {"code": os.waitstatus_to_exitcode(status)}
        control.send(json.dumps(answer).encode())
        return
    try:
        pid = os.fork()
    except OSError as error:
        # The children that there are live on.
        answer = {"error": f"cannot fork: {error.strerror}"}
        control.send(json.dumps(answer).encode())
    else:
        if pid == 0:
            control.close()
            _become(request, *fds)
            raise _Born(request)
        # Nobody else reaps: until the launcher asks for its exit code, the pid is this process's.
        pidfd = os.pidfd_open(pid)
        socket.send_fds(control, [json.dumps({"pid": pid}).encode()], [pidfd])
        os.close(pidfd)
    for fd in fds:
        os.close(fd)


def _become(request: Any, log_fd: int, ready_fd: int) -> None:
    """Make a forked process what `Popen` would have made it."""
    # Off while the nursery imports.
    gc.enable()
    os.setpgid(0, 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(log_fd)
    # The nursery's own, if it is not ready yet.
    os.close(int(os.environ[READY_VARIABLE]))
    for name, value in request["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.environ[READY_VARIABLE] = str(ready_fd)
    # Python's own generator is seeded anew by itself, and torch's has the same seed in each process anyway.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    words = [sys.executable, "-m", request["module"], *request["arguments"]]
    try:
        set_command_line(words)
    except OSError:
        # Who looks for a process must find it: rather start the slow way.
        os.set_inheritable(ready_fd, True)
        os.execv(words[0], words)


if __name__ == "__main__":
    main()
