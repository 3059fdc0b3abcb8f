"""The floor's server: `python -m benchmarks.dispatch.floor_process PID FD SIZE RESULT_BYTES CORE`."""

from __future__ import annotations

import os
import sys

from benchmarks.dispatch import _floor
from benchmarks.dispatch.floor import map_shared
from eaas.launcher_pipe import announce, bind_to_launcher

__all__ = ["main"]


def main(pid: int, fd: int, size: int, result_bytes: int, core: int) -> None:
    """Answer the launcher's round trips until SIGTERM, pinned to a core.

    Args:
        pid, fd: Descriptor of the memory in the launcher.
        result_bytes: Size of the largest result.
    """
    bind_to_launcher()
    os.sched_setaffinity(0, {core})
    own_fd = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
    mapping = map_shared(own_fd, size)
    os.close(own_fd)
    source = bytearray(os.urandom(result_bytes))
    announce(ready="floor")
    _floor.serve(mapping, source)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:6]))
