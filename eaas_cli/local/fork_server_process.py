"""The fork server's process: imports modules once, then forks one process per request (ADR 0012)."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eaas.checkpoint.lean_import import import_transformers
from eaas.launcher_pipe import READY_VARIABLE, announce, bind_to_launcher

__all__ = ["become", "main", "serve_one", "set_command_line"]

_REQUEST_BYTES = 1 << 20
_PAUSE_S = 0.02
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
# Places of the fields in /proc/PID/stat (proc_pid_stat(5) counts from 1).
_STAT_FIELDS = {
    "start_code": 26,
    "end_code": 27,
    "start_stack": 28,
    "start_data": 45,
    "end_data": 46,
    "start_brk": 47,
    "env_start": 50,
    "env_end": 51,
}
_NO_FILE = 0xFFFF_FFFF


class _InChild(Exception):
    """Raised in a forked process, to leave the fork server's stack. Holds the request."""


def main() -> None:
    """Serve the launcher until it closes the socket; in a forked process, run the requested module."""
    bind_to_launcher()
    # transformers reads these when it is imported. Checkpoints are local, so nothing is downloaded.
    os.environ["HF_HUB_OFFLINE"] = "1"
    control = socket.socket(fileno=int(sys.argv[1]))
    # Imports make hardly any garbage, but collection would take a quarter of the time.
    gc.disable()
    first, later = (words.split() for words in sys.argv[2:])
    try:
        _import(first)
        announce(ready="")
        while later:
            # Serve between imports: expert servers, which the launcher now asks for, load beside the rest.
            if select.select([control], [], [], _PAUSE_S)[0]:
                serve_one(control, later)
            else:
                _import([later.pop(0)])
        gc.enable()
        while True:
            serve_one(control, later)
    except _InChild as child:
        (request,) = child.args
    # This is outside the block, so that the child's errors do not show _InChild as their context.
    sys.argv[:] = [request["module"], *request["arguments"]]
    runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


def _import(modules: list[str]) -> None:
    for module in modules:
        if module == "transformers":
            import_transformers()
        importlib.import_module(module)
    # Exempt the imports from collection, because a collector in a child would copy their pages.
    gc.freeze()


def serve_one(control: socket.socket, later: list[str]) -> None:
    """Answer one request of the launcher: fork a process, or reap one that has ended.

    Args:
        later: Modules to import before a process that needs all; emptied then.

    Raises _InChild in a forked child, SystemExit if the launcher has closed.
    """
    message, fds, _, _ = socket.recv_fds(control, _REQUEST_BYTES, 2)
    if not message:
        sys.exit()
    request = json.loads(message)
    if "reap" in request:
        _, status = os.waitpid(request["reap"], 0)
        answer: dict[str, object] = {"code": os.waitstatus_to_exitcode(status)}
        control.send(json.dumps(answer).encode())
        return
    if request["needs_all"]:
        _import(later)
        later.clear()
    try:
        pid = os.fork()
    except OSError as error:
        answer = {"error": f"cannot fork: {error.strerror}"}
        control.send(json.dumps(answer).encode())
    else:
        if pid == 0:
            control.close()
            become(request, *fds)
            raise _InChild(request)
        # Only the launcher's request reaps the child, so the pid is not reused before that.
        pidfd = os.pidfd_open(pid)
        socket.send_fds(control, [json.dumps({"pid": pid}).encode()], [pidfd])
        os.close(pidfd)
    for fd in fds:
        os.close(fd)


def become(request: Any, log_fd: int, ready_fd: int) -> None:
    """Give a forked process its log, environment and command line, as `Popen` would."""
    # The collector was off while the fork server imported.
    gc.enable()
    os.setpgid(0, 0)
    os.dup2(log_fd, 1)
    os.dup2(log_fd, 2)
    os.close(log_fd)
    # This is the fork server's own pipe, which is open if the fork server is not ready yet.
    os.close(int(os.environ[READY_VARIABLE]))
    for name, value in request["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.environ[READY_VARIABLE] = str(ready_fd)
    # Python reseeds its own generator after a fork; torch's has a fixed seed anyway.
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    words = [sys.executable, "-m", request["module"], *request["arguments"]]
    try:
        set_command_line(words)
    except OSError:
        # Execute the program, which is slow, because people must find the process by its command line.
        os.set_inheritable(ready_fd, True)
        os.execv(words[0], words)


class _MemoryMap(ctypes.Structure):
    """`struct prctl_mm_map` of linux/prctl.h: where a process's code, heap and arguments lie."""

    _fields_ = [
        *(
            (name, ctypes.c_uint64)
            for name in (
                *("start_code", "end_code", "start_data", "end_data", "start_brk", "brk"),
                *("start_stack", "arg_start", "arg_end", "env_start", "env_end", "auxv"),
            )
        ),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


def set_command_line(words: Sequence[str]) -> None:
    """Set the command line that `ps` shows for this process, a child of the fork server.

    PR_SET_MM_MAP needs no privilege. Call it while no other thread allocates memory.

    Raises OSError: the kernel was built without CONFIG_CHECKPOINT_RESTORE, or a sandbox refuses.
    """
    text = b"".join(os.fsencode(word) + b"\0" for word in words)
    # Fields from the third on, because the second, the name, may contain blanks and parentheses.
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    libc = ctypes.CDLL(None, use_errno=True)
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    # The buffer is never freed, because the kernel reads it until the process ends.
    start = libc.malloc(ctypes.c_size_t(len(text)))
    ctypes.memmove(start, text, len(text))
    layout = _MemoryMap(
        arg_start=start,
        arg_end=start + len(text),
        exe_fd=_NO_FILE,
        **{name: int(fields[place - 3]) for name, place in _STAT_FIELDS.items()},
    )
    # The call also sets the end of the heap, so read that last.
    layout.brk = libc.sbrk(0)
    if libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, ctypes.byref(layout), ctypes.sizeof(layout), 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_MM_MAP)")


if __name__ == "__main__":
    main()
