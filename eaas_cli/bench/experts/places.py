"""The CPU and a GPU: what differs between the places where `eaas bench experts` measures."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any, NamedTuple, TypeVar, cast

import torch

from eaas import free_memory
from eaas.errors import ConfigError
from eaas.log import one_line
from eaas.memory import huge_memory
from eaas_cli.bench.command import find_gpu
from eaas_cli.bench.experts.source import Batch, Batches, Source
from expert_server.kernels import _native
from expert_server.kernels.choose import KERNELS, ON_REQUEST
from expert_server.kernels.kernel import ExpertKernel, KernelSpec, UnsupportedError
from expert_server.weights.weights import ExpertForm

__all__ = ["Compute", "Cpu", "Cuda", "Way"]

_T = TypeVar("_T")
Compute = Callable[[Batch], torch.Tensor]


class Way(NamedTuple):
    """One way to measure a limit: a call, and the bytes or FLOP of it."""

    amount: int
    call: Callable[[], object]


class Cpu:
    """All kernels of the registry, against transformers' implementations.

    Args:
        threads: Intra-op threads.

    Attributes:
        at: Where the batches lie.
        kernels: Makes of the kernels that take part, by name.
        has_auto: Whether `auto` takes part.
        baselines: Names of what the kernels are compared with.
        warm_ups: Calls of an implementation before the first that is timed.
        read_bytes: Size of the buffer: far larger than any last-level cache, to evict everything else.
        products: Rows, inner size and columns of the matrix products.
    """

    at = torch.device("cpu")
    kernels: Mapping[str, Callable[[Sequence[ExpertForm], KernelSpec], ExpertKernel]] = KERNELS
    has_auto = True
    baselines: tuple[str, ...] = ("eager", "grouped_mm", "batched_mm")
    warm_ups = 0
    read_bytes = 5 << 28
    products: tuple[tuple[int, int, int], ...] = (
        *((512, 1024, 4096), (1024, 1024, 8192)),
        *((1024, 2048, 4096), (2048, 2048, 2048)),
    )
    settle_s = 0.02

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def timed(self, call: Callable[[], _T]) -> tuple[float, _T]:
        """Call a function; return the seconds until its work is done, and its answer."""
        started = time.perf_counter()
        answer = call()
        return time.perf_counter() - started, answer

    def settle(self) -> None:
        """Wait until the last call no longer slows the next: torch's OpenMP threads spin for about 10 ms."""
        time.sleep(self.settle_s)

    def ways_to_read(self) -> dict[str, Way]:
        """Return ways to read memory, of which the fastest is the limit; each leaves the caches cold."""
        buffer = huge_memory(self.read_bytes).view(torch.float32).fill_(1)
        ways: dict[str, Callable[[], object]] = {"sum": buffer.sum}
        for columns in (4096, 16384, 65536):
            ways[f"matrix times vector of {columns}"] = partial(
                torch.mv, buffer.view(-1, columns), torch.ones(columns)
            )
        pool = _native.create_pool(self._threads)

        # It holds the buffer, of which compiled code has only the address.
        def read() -> None:
            _native.read(pool, buffer.data_ptr(), buffer.nbytes)

        ways["compiled"] = read
        return {name: Way(buffer.nbytes, call) for name, call in ways.items()}

    def ways_to_multiply(self, dtype: torch.dtype) -> dict[str, Way]:
        """Return ways to multiply matrices of a dtype: by torch, or packed for oneDNN."""
        ways = {}
        for rows, inner, columns in self.products:
            x, weight = (torch.randn(n, inner).to(dtype) for n in (rows, columns))
            size, flop = f"{rows} x {inner} x {columns}", 2 * rows * inner * columns
            ways[f"torch {size}"] = Way(flop, partial(torch.mm, x, weight.t()))
            ops = torch.ops.mkldnn
            try:
                packed = ops._reorder_linear_weight(weight, None)
                multiply = partial(ops._linear_pointwise, x, packed, None, "none", [], "")
                multiply()
            except (AttributeError, RuntimeError):
                continue  # Some builds of torch and some CPUs lack these private operators.
            ways[f"oneDNN {size}"] = Way(flop, multiply)
        return ways

    def compute(self, kernel: ExpertKernel, batch: Batch) -> torch.Tensor:
        """Compute a batch in layer 0 of a kernel of this place."""
        return kernel(batch.x_TH, batch.ids_TK, batch.scores_TK, 0)

    def baseline(self, name: str, source: Source) -> Compute:
        """Return what computes batches as a baseline does. Raises UnsupportedError: it does not work here."""
        return partial(source.compute, name)

    def free_bytes(self) -> int:
        """Return the bytes of memory that are free for weights and batches."""
        return free_memory.free_bytes()

    def describe(self) -> dict[str, Any]:
        """Return what the document's entry `machine` says only of this place."""
        return {}


class Cuda(Cpu):
    """Kernel `triton` on batches in the memory of the current GPU, against kernels on stacked weights.

    Events time the work of the current stream. A call's time includes pauses in which the device waits for
    the host to issue the next operator, as a server's batches do.

    Raises:
        ConfigError: torch finds no GPU, or Triton is not installed.
    """

    kernels = ON_REQUEST
    has_auto = False
    # transformers' `grouped_mm` is torch._grouped_mm.
    baselines = ("grouped_mm", "vllm")
    # The first compiles device code.
    warm_ups = 2
    read_bytes = 1 << 30
    products = ((4096, 4096, 4096), (8192, 8192, 8192))
    settle_s = 0.0  # `timed` has waited.

    def __init__(self) -> None:
        self.at = find_gpu()
        if find_spec("triton") is None:
            raise ConfigError(
                "--device cuda: Triton is not installed: pip install 'expert-as-a-service[triton]'"
            )

    def timed(self, call: Callable[[], _T]) -> tuple[float, _T]:
        """Time a call on the device, and wait for its end."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        answer = call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3, answer

    def ways_to_read(self) -> dict[str, Way]:
        """Return a copy, which reads and writes as many bytes, and a sum."""
        buffer, other = (torch.ones(self.read_bytes // 4, device=self.at) for _ in range(2))
        return {
            "copy": Way(2 * buffer.nbytes, partial(other.copy_, buffer)),
            "sum": Way(buffer.nbytes, buffer.sum),
        }

    def ways_to_multiply(self, dtype: torch.dtype) -> dict[str, Way]:
        """Return large square products."""
        ways = {}
        for rows, inner, columns in self.products:
            left, right = (torch.randn(n, inner, device=self.at).to(dtype) for n in (rows, columns))
            call = partial(torch.mm, left, right.t())
            ways[f"torch {rows} x {inner} x {columns}"] = Way(2 * rows * inner * columns, call)
        return ways

    def compute(self, kernel: ExpertKernel, batch: Batch) -> torch.Tensor:
        """Issue the kernel's launches, without the copies between host and device."""
        from expert_server.kernels.gpu.kernel import TritonKernel

        issue = cast("TritonKernel", kernel).issue
        return issue(batch.x_TH, batch.ids_TK, batch.scores_TK, 0)

    def baseline(self, name: str, source: Source) -> Compute:
        """Return transformers' implementation of that name, or vLLM's fused MoE."""
        return _fused_moe(source) if name == "vllm" else partial(source.compute, name)

    def free_bytes(self) -> int:
        """Return the device's free memory, with what torch keeps in reserve."""
        torch.cuda.empty_cache()
        free: int = torch.cuda.mem_get_info()[0]
        return free

    def describe(self) -> dict[str, Any]:
        """Return the device's name and CUDA's version."""
        return {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}


def _fused_moe(source: Source) -> Compute:
    """Return vLLM's fused MoE on the source's weights, once it has computed a token."""
    if find_spec("vllm") is None:
        raise UnsupportedError("vLLM is not installed here")
    try:
        from vllm.model_executor.layers.fused_moe.fused_moe import fused_experts

        @torch.inference_mode()
        def compute(batch: Batch) -> torch.Tensor:
            answer: torch.Tensor = fused_experts(
                hidden_states=batch.x_TH,
                w1=source.up_ENH,
                w2=source.down_EHI,
                topk_weights=batch.scores_TK,
                topk_ids=batch.ids_TK.int(),
            )
            return answer

        compute(Batches(source.shape, source.dtype, 1).get(1, 0).to(source.up_ENH.device))
    except Exception as error:
        # Its functions change from version to version; the other implementations can be measured.
        raise UnsupportedError(f"it fails: {one_line(error)}") from error
    return compute
