"""The machine's speed of memory reads and of matrix products, measured throughout a run.

On a shared machine both change from minute to minute. A kernel is compared with the speeds right before and
right after its call. Each limit is the best of several ways, because a slow one would flatter every kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import torch

from eaas.memory import huge_memory
from eaas_cli.bench.experts.roofline import Speed
from expert_server.kernels import _native

__all__ = ["READ_BYTES", "Limits", "MultiplyLimit", "ReadLimit", "settle"]

# The buffer is far larger than any last-level cache, so that reading it evicts everything else.
READ_BYTES = 5 << 28
_TRIES = 9
_SETTLE_S = 0.02
_PRODUCTS = ((512, 1024, 4096), (1024, 1024, 8192), (1024, 2048, 4096), (2048, 2048, 2048))


class ReadLimit:
    """Measures the speed of reads from memory with all threads. A measurement leaves the caches cold.

    Attributes:
        way: The fastest way, which is used.
        samples: Bytes/s of each read.
    """

    def __init__(self, threads: int) -> None:
        # Keep the buffer alive, because the compiled way has only its address.
        self._buffer = huge_memory(READ_BYTES).view(torch.float32).fill_(1)
        ways = _ways_to_read(self._buffer, threads)
        self.way = _fastest(ways)
        self._read = ways[self.way]
        self.samples: list[float] = []
        self.measure()

    def measure(self) -> float:
        """Measure the read speed now, in bytes/s; keep it in `samples`."""
        settle()
        self.samples.append(READ_BYTES / _seconds(self._read))
        return self.samples[-1]


class MultiplyLimit:
    """Measures the speed of a matrix product that fits the caches, by torch or packed for oneDNN.

    Attributes:
        way: The fastest way, which is used.
        samples: FLOP/s of each measurement.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        ways: dict[str, Callable[[], object]] = {}
        flops: dict[str, int] = {}
        for sizes in _PRODUCTS:
            for name, way in _ways_to_multiply(sizes, dtype).items():
                ways[name] = way
                flops[name] = 2 * sizes[0] * sizes[1] * sizes[2]
        self.way = _fastest(ways, flops)
        self._multiply, self._flops = ways[self.way], flops[self.way]
        self.samples: list[float] = []
        self.measure(0.1)

    def measure(self, seconds: float) -> float:
        """Measure the speed of products now, in FLOP/s, for at least `seconds`; keep it in `samples`."""
        done, took, started = 0, 0.0, time.perf_counter()
        while took < seconds:
            self._multiply()
            done += 1
            took = time.perf_counter() - started
        self.samples.append(done * self._flops / took)
        return self.samples[-1]


class Limits:
    """The machine's read and multiply limits for one dtype of products."""

    def __init__(self, read: ReadLimit, multiply: MultiplyLimit) -> None:
        self.dtype = multiply.dtype
        self.compute = str(self.dtype).removeprefix("torch.")
        self._read, self._multiply = read, multiply

    def typical(self) -> Speed:
        """Median of the speeds measured so far, to predict whether reads or products limit a batch size."""
        return Speed(median(self._read.samples), median(self._multiply.samples))

    def measure(self, multiply_s: float) -> Speed:
        """Measure the read and multiply speeds now; the caches are cold afterwards.

        `multiply_s`: seconds of products; 0: use the median so far.
        """
        samples = self._multiply.samples
        multiply = self._multiply.measure(multiply_s) if multiply_s else median(samples)
        return Speed(self._read.measure(), multiply)


def settle() -> None:
    """Sleep until the threads of the last call sleep, so that they do not slow the next one.

    torch's OpenMP threads spin for about 10 ms.
    """
    time.sleep(_SETTLE_S)


def _ways_to_read(buffer: torch.Tensor, threads: int) -> dict[str, Callable[[], object]]:
    ways: dict[str, Callable[[], object]] = {"sum": buffer.sum}
    for columns in (4096, 16384, 65536):
        ways[f"matrix times vector of {columns}"] = partial(
            torch.mv, buffer.view(-1, columns), torch.ones(columns)
        )
    pool = _native.create_pool(threads)
    return ways | {"compiled": partial(_native.read, pool, buffer.data_ptr(), buffer.nbytes)}


def _ways_to_multiply(
    sizes: tuple[int, int, int], dtype: torch.dtype
) -> dict[str, Callable[[], object]]:
    rows, inner, columns = sizes
    x = torch.randn(rows, inner).to(dtype)
    weight = torch.randn(columns, inner).to(dtype)
    name = f"{rows} x {inner} x {columns}"
    ways: dict[str, Callable[[], object]] = {f"torch {name}": partial(torch.mm, x, weight.t())}
    ops = torch.ops.mkldnn
    try:
        packed = ops._reorder_linear_weight(weight, None)
        multiply = partial(ops._linear_pointwise, x, packed, None, "none", [], "")
        multiply()
    except (AttributeError, RuntimeError):
        return ways  # These private operators are missing in some builds of torch and on some CPUs.
    return ways | {f"oneDNN {name}": multiply}


def _fastest(
    ways: Mapping[str, Callable[[], object]], amounts: Mapping[str, int] | None = None
) -> str:
    """Time every way; return the name of the one with the best median speed, which the run then uses."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_TRIES):
        for name, way in ways.items():
            settle()
            seconds[name].append(_seconds(way))
    return max(ways, key=lambda name: (amounts[name] if amounts else 1) / median(seconds[name]))


def _seconds(way: Callable[[], object]) -> float:
    started = time.perf_counter()
    way()
    return time.perf_counter() - started
