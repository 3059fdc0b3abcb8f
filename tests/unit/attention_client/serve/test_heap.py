"""Memory that a burst of requests leaves behind."""

from __future__ import annotations

import subprocess
import sys

import pytest

from attention_client.serve import batching, heap

# glibc alone keeps such pages.
GLIBC = pytest.mark.skipif(sys.platform != "linux", reason="of glibc")

BURST = """
import ctypes, runpy, sys
# Of the package the rest would import torch.
trim_heap = runpy.run_path(sys.argv[1])["trim_heap"]
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]

def resident_kib():
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Private_Dirty"))

before = resident_kib()
burst = [libc.malloc(100_000) for _ in range(400)]
for address in burst:
    ctypes.memset(address, 1, 100_000)
# The last one stays, above all others.
for address in burst[:-1]:
    libc.free(address)
kept = resident_kib() - before
trim_heap()
print(kept, resident_kib() - before)
"""


@GLIBC
def test_a_burst_is_given_back() -> None:
    out = subprocess.run(
        [sys.executable, "-c", BURST, heap.__file__],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout
    kept, left = map(int, out.split())
    assert kept > 30_000, "without a look nothing goes back"
    assert left < 5_000


def test_once_after_each_time_of_work(monkeypatch: pytest.MonkeyPatch) -> None:
    trims = []
    monkeypatch.setattr(batching, "trim_heap", lambda: trims.append(1))
    monkeypatch.setattr(batching, "_IDLE_S", 0.01)
    bell = batching._Bell()
    for count in (1, 2):
        bell.idle = False
        bell.wait(0.0)
        assert len(trims) == count - 1, "not while requests run"
        bell.idle = True
        bell.set()
        bell.wait()
        assert len(trims) == count - 1, "not where one has just come"
        bell.clear()
        for _ in range(3):
            bell.wait()
        assert len(trims) == count
