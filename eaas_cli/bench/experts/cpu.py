"""The CPU as the place of `eaas bench experts`."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from eaas import free_memory
from eaas.memory import huge_memory
from eaas_cli.bench.experts.place import Compute, Place, Way
from eaas_cli.bench.experts.source import Batch, Source
from expert_server.kernels import _native
from expert_server.kernels.choose import KERNELS
from expert_server.kernels.kernel import ExpertKernel

__all__ = ["READ_BYTES", "Cpu", "settle"]

# The buffer is far larger than any last-level cache, so that reading it evicts everything else.
READ_BYTES = 5 << 28
_SETTLE_S = 0.02
_PRODUCTS = ((512, 1024, 4096), (1024, 1024, 8192), (1024, 2048, 4096), (2048, 2048, 2048))

_T = TypeVar("_T")


class Cpu(Place):
    """All kernels of the registry, against transformers' implementations.

    Args:
        threads: Intra-op threads.
    """

    at = torch.device("cpu")
    kernels = KERNELS
    has_auto = True
    baselines = ("eager", "grouped_mm", "batched_mm")
    warm_ups = 0

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def timed(self, call: Callable[[], _T]) -> tuple[float, _T]:
        """Time a call (`Place.timed`)."""
        started = time.perf_counter()
        answer = call()
        return time.perf_counter() - started, answer

    def settle(self) -> None:
        """Let the threads of the last call fall asleep."""
        settle()

    def ways_to_read(self) -> dict[str, Way]:
        """Return ways to read a buffer with all threads."""
        buffer = huge_memory(READ_BYTES).view(torch.float32).fill_(1)
        ways: dict[str, Callable[[], object]] = {"sum": buffer.sum}
        for columns in (4096, 16384, 65536):
            ways[f"matrix times vector of {columns}"] = partial(
                torch.mv, buffer.view(-1, columns), torch.ones(columns)
            )
        pool = _native.create_pool(self._threads)

        # It holds the buffer, of which compiled code has only the address.
        def read() -> None:
            _native.read(pool, buffer.data_ptr(), buffer.nbytes)

        return {
            name: Way(buffer.nbytes, call) for name, call in (ways | {"compiled": read}).items()
        }

    def ways_to_multiply(self, dtype: torch.dtype) -> dict[str, Way]:
        """Return products that fit the caches, by torch or packed for oneDNN."""
        return {
            name: Way(2 * sizes[0] * sizes[1] * sizes[2], call)
            for sizes in _PRODUCTS
            for name, call in _products(sizes, dtype).items()
        }

    def compute(self, kernel: ExpertKernel, batch: Batch) -> torch.Tensor:
        """Call the kernel."""
        return kernel(batch.x_TH, batch.ids_TK, batch.scores_TK, 0)

    def baseline(self, name: str, source: Source) -> Compute:
        """Return one of transformers' implementations."""
        return partial(source.compute, name)

    def free_bytes(self) -> int:
        """Return the memory that this process can still take."""
        return free_memory.free_bytes()

    def describe(self) -> dict[str, Any]:
        """Return nothing: the document describes the processor anyway."""
        return {}


def settle() -> None:
    """Sleep until the threads of the last call sleep, so that they do not slow the next one.

    torch's OpenMP threads spin for about 10 ms.
    """
    time.sleep(_SETTLE_S)


def _products(sizes: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Callable[[], object]]:
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
