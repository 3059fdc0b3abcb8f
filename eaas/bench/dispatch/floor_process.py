"""The floor's server: `python -m eaas.bench.dispatch.floor_process PID FD SIZE RESULT_BYTES CORE`."""

from __future__ import annotations

import os
import sys

from eaas.bench.dispatch import _floor
from eaas.bench.dispatch.floor import map_shared
from eaas.local.child import announce, bind_to_launcher

__all__ = ["main"]


def main(pid: int, fd: int, size: int, result_bytes: int, core: int) -> None:
    """Answer until SIGTERM.

    Args:
        pid, fd: Where the memory is: a descriptor of the process that started this one.
        size: Of the memory.
        result_bytes: Of the largest result.
        core: To stay on.
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
