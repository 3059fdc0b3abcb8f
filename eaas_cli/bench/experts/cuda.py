"""A GPU as the place of `eaas bench experts`.

Events time the work of the current stream. A call's time includes pauses in which the device waits for the
host to issue the next operator, as a server's batches do.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any, TypeVar, cast

import torch

from eaas.errors import ConfigError
from eaas.log import one_line
from eaas_cli.bench.device import find_gpu
from eaas_cli.bench.experts.place import Compute, Place, Way
from eaas_cli.bench.experts.source import Batch, Batches, Source
from expert_server.kernels.choose import ON_REQUEST
from expert_server.kernels.kernel import ExpertKernel, UnsupportedError

__all__ = ["Cuda"]

# Far larger than any GPU's L2 cache, so that copying it leaves the cache cold.
_READ_BYTES = 1 << 30
_PRODUCTS = (4096, 8192)

_T = TypeVar("_T")


class Cuda(Place):
    """Kernel `triton` on batches in the memory of the current GPU, against kernels on stacked weights.

    Raises:
        ConfigError: torch finds no GPU, or Triton is not installed.
    """

    kernels = ON_REQUEST
    has_auto = False
    # transformers' `grouped_mm` is torch._grouped_mm.
    baselines = ("grouped_mm", "vllm")
    # The first compiles device code.
    warm_ups = 2

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

    def settle(self) -> None:
        """Do nothing: `timed` has waited."""

    def ways_to_read(self) -> dict[str, Way]:
        """Return a copy, which reads and writes as many bytes, and a sum."""
        buffer, other = (torch.ones(_READ_BYTES // 4, device=self.at) for _ in range(2))
        return {
            "copy": Way(2 * buffer.nbytes, partial(other.copy_, buffer)),
            "sum": Way(buffer.nbytes, buffer.sum),
        }

    def ways_to_multiply(self, dtype: torch.dtype) -> dict[str, Way]:
        """Return large square products."""
        ways = {}
        for size in _PRODUCTS:
            left, right = (torch.randn(size, size, device=self.at).to(dtype) for _ in range(2))
            ways[f"torch {size} x {size} x {size}"] = Way(
                2 * size**3, partial(torch.mm, left, right.t())
            )
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
