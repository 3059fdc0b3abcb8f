"""In a process that the fork server forked: sets the command line that `ps` and /proc/PID/cmdline show."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["set_command_line"]

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
