"""`python -m eaas_cli.chaos.child ...`: the `eaas` program in its own namespaces (Linux, root).

CHAOS_CHILD in the environment: {"network": file of a network namespace, "shared_memory": bytes of /dev/shm,
"processes": true for its own pid namespace}; each key is optional.
"""

from __future__ import annotations

import ctypes
import json
import os
import runpy
import signal

from eaas.launcher_pipe import bind_to_launcher

__all__ = ["VARIABLE", "enter_network", "hide_processes", "shrink_shared_memory"]

VARIABLE = "CHAOS_CHILD"
_CLONE_NEWNS, _CLONE_NEWNET, _CLONE_NEWPID = 0x00020000, 0x40000000, 0x20000000
_PR_SET_PDEATHSIG = 1
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18


def enter_network(path: str) -> None:
    """Move this process, before it runs `eaas`, into a network namespace that the fault "partition" cuts.

    It must have a single thread. Raises OSError.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc().setns(fd, _CLONE_NEWNET), f"setns {path}")
    finally:
        os.close(fd)


def shrink_shared_memory(size: int) -> None:
    """Mount a /dev/shm of `size` bytes that only this process and its children see.

    For the fault "memory": the expert server finds no room and must say so. Raises OSError.
    """
    libc = _libc()
    _check(libc.unshare(_CLONE_NEWNS), "unshare")
    # From here on, other processes do not see this process's mounts.
    _check(libc.mount(None, b"/", None, ctypes.c_ulong(_MS_REC | _MS_PRIVATE), None), "mount /")
    options = f"size={size}".encode()
    _check(libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", ctypes.c_ulong(0), options), "mount tmpfs")


def hide_processes() -> None:
    """Fork, and continue in the child, which has its own pid namespace, for the fault "unreachable".

    Other processes cannot open the child's memory by the pid that it reports. The parent forwards signals and
    ends with the child. Raises OSError.
    """
    bind_to_launcher()
    _check(_libc().unshare(_CLONE_NEWPID), "unshare")
    child = os.fork()
    if child == 0:
        _check(_libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl")
        return
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda given, _frame: os.kill(child, given))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def _main() -> None:
    wanted = json.loads(os.environ.pop(VARIABLE))
    if "network" in wanted:
        enter_network(wanted["network"])
    if "shared_memory" in wanted:
        shrink_shared_memory(wanted["shared_memory"])
    if wanted.get("processes"):
        hide_processes()
    runpy.run_module("eaas_cli", run_name="__main__")


if __name__ == "__main__":
    _main()
