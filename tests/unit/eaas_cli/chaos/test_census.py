"""What a process holds, and whether it is there."""

from __future__ import annotations

import os
import subprocess
import sys

from eaas.net.server_records import started_at
from eaas_cli.chaos.history import census, still_running

HOLDS = """
import mmap, os, sys
fd = os.open("/dev/shm", os.O_TMPFILE | os.O_RDWR)
os.ftruncate(fd, 1 << 16)
area = mmap.mmap(fd, 1 << 16)
kept = bytearray(os.urandom(1) * (8 << 20))
print("ready", flush=True)
sys.stdin.readline()
more = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
area.close()
kept += bytes(kept)
print("ready", flush=True)
sys.stdin.readline()
"""


def test_resources_of_a_live_process_are_counted() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        pids = {"a": child.pid, "nobody": (1 << 22) - 1}
        child.stdout.readline()
        births = {pid: started_at(pid) for pid in pids.values()}
        (first,) = census(pids, births).values()
        assert (first.pid, first.segments) == (child.pid, 1)
        assert first.resident_bytes > 8 << 20
        child.stdin.write("\n")
        child.stdin.flush()
        child.stdout.readline()
        second = census(pids, births)["a"]
        # Python's mapping had one of its own.
        assert second.descriptors == first.descriptors + 3 - 1
        assert second.segments == 0
        assert second.resident_bytes - first.resident_bytes > 7 << 20
        assert list(still_running(births)) == [child.pid]
        # Another one, which has the pid of one that was born before.
        strangers = {pid: max(0, born - 1) for pid, born in births.items()}
        assert list(still_running(strangers)) == []
        assert census(pids, strangers) == {}
        child.kill()
        # Not reaped yet: it is gone all the same.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert list(still_running(births)) == []
        assert census(pids, births) == {}
        assert started_at(child.pid) == 0
