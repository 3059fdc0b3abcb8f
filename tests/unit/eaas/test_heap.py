"""The C heap after a burst of requests."""

from __future__ import annotations

import subprocess
import sys

import pytest

from eaas import heap

GLIBC = pytest.mark.skipif(sys.platform != "linux", reason="of glibc")

BURST = """
import ctypes, runpy, sys
# An import of the package would import torch.
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
# The last block stays, above all others.
for address in burst[:-1]:
    libc.free(address)
kept = resident_kib() - before
trim_heap()
print(kept, resident_kib() - before)
"""

THREADS = """
import ctypes, runpy, sys, threading
if len(sys.argv) > 2:
    runpy.run_path(sys.argv[1])["share_heaps"]()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.fopen.restype = ctypes.c_void_p
libc.malloc_info.argtypes, libc.fclose.argtypes = [ctypes.c_int, ctypes.c_void_p], [ctypes.c_void_p]

meet = threading.Barrier(12)
def allocate():
    libc.malloc(10_000)
    meet.wait()  # so that none of them has ended when another begins
threads = [threading.Thread(target=allocate) for _ in range(12)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
file = libc.fopen(b"/dev/stdout", b"w")
libc.malloc_info(0, file)
libc.fclose(file)
"""


def _run(program: str, *arguments: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program, heap.__file__, *arguments],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    ).stdout


@GLIBC
def test_threads_share_heaps() -> None:
    assert _run(THREADS).count("<heap nr") > 4, "by default each thread has its own"
    assert _run(THREADS, "shared").count("<heap nr") == 2


@GLIBC
def test_trimming_returns_a_burst() -> None:
    kept, left = map(int, _run(BURST).split())
    assert kept > 30_000, "glibc alone returns nothing"
    assert left < 5_000
