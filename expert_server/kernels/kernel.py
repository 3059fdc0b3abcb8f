"""Interface of an expert server's kernels: each holds packed routed experts and computes the loop's batches.

Legend: T tokens, K top-k, H hidden, I intermediate, E logical experts, N rows (a token and one of its
experts).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch

from eaas.checkpoint.formats import StoredFormat
from eaas.checkpoint.pieces import Pause, at_once
from expert_server.weights.weights import ExpertForm, ExpertWeights

__all__ = [
    "ExpertKernel",
    "KernelSpec",
    "Quantization",
    "Sized",
    "StoredFormat",
    "UnsupportedError",
]


class Quantization(StrEnum):
    """Format of the weights (activations keep at least 15 bits)."""

    NONE = "none"
    INT8 = "int8"  # symmetric, one scale per output channel
    INT4 = "int4"  # symmetric, one scale per output channel and group of 128 inputs


@dataclass(frozen=True)
class KernelSpec:
    """Number formats and threads that a kernel computes with.

    Attributes:
        dtype: Dtype of the products' inputs (bfloat16, float32; the reference also takes float64).
        quantization: Format to which the checkpoint's float weights are quantised on loading.
        threads: Intra-op threads.
        stored: Format in which the checkpoint holds quantised weights; None: they are floats.

    Raises:
        ValueError: Both `quantization` and `stored` are set: the weights would be quantised twice.
    """

    dtype: torch.dtype
    quantization: Quantization = Quantization.NONE
    threads: int = 1
    stored: StoredFormat | None = None

    def __post_init__(self) -> None:
        if self.stored is not None and self.quantization is not Quantization.NONE:
            raise ValueError(f"{self.stored} weights cannot be quantised to {self.quantization}")


class UnsupportedError(Exception):
    """A kernel cannot serve this model on this CPU; states the reason. `auto` skips such a kernel."""


class Sized(Protocol):
    """A packed expert: any object that reports its memory."""

    @property
    def nbytes(self) -> int:
        """Memory of the packed expert, in bytes; the kernel adds it up (`ExpertKernel.bytes`)."""
        ...


class ExpertKernel(abc.ABC):
    """Owns packed experts and computes their part of an MoE layer, for the serving loop.

    `load` and `unload` may run in one thread while another computes. Entries are replaced whole, and dict
    operations are atomic, so the computing thread takes no lock.

    Args:
        forms: How the experts of each MoE layer compute.
        spec: What to compute with.

    Raises:
        UnsupportedError: The kernel cannot do this on this CPU.
    """

    name: ClassVar[str]
    # The instruction set it uses, if known.
    isa: str = ""
    # For each MoE layer what the loop's compiled code calls (direct.h); None while it can only be called from
    # Python. No list: the kernel has no such layers.
    direct: list[object | None] | None = None

    def __init__(self, forms: Sequence[ExpertForm], spec: KernelSpec) -> None:
        self.forms = tuple(forms)
        self.spec = spec
        self._packed: dict[tuple[int, int], Sized] = {}
        self._bytes = 0
        self._counts_LX: npt.NDArray[np.int64] | None = None

    @property
    def count(self) -> int:
        """Number of expert replicas that the kernel holds, over all MoE layers."""
        return len(self._packed)

    @property
    def bytes(self) -> int:
        """Memory of the expert replicas held, in bytes and in the kernel's layout, without scratch."""
        return self._bytes

    def holds(self, layer: int, expert: int) -> bool:
        """Whether the kernel holds a replica of this expert; if not, a batch that needs it is refused."""
        return (layer, expert) in self._packed

    def count_into(self, counts_LX: npt.NDArray[np.int64]) -> None:
        """Count the tokens of each expert into this array, in every later batch; the balancer reads the sums.

        The rows are in the order of their experts anyway, so counting costs nothing.

        Args:
            counts_LX: (L, 1 + E), C-contiguous. Column 0 counts experts with tokens per call, the others the
                tokens of each expert.
        """
        self._counts_LX = counts_LX

    def load(self, layer: int, expert: int, weights: ExpertWeights, pause: Pause = at_once) -> None:
        """Pack an expert and hold it for batches; `weights` may be freed afterwards.

        One thread at a time. A replica that is already held is dropped once the new one is packed.

        Args:
            layer: MoE layer.
            expert: Logical expert.
            weights: The expert's weights.
            pause: Called before each packed piece.

        Raises:
            CheckpointError: A weight to be quantised or a scale is NaN or infinite, or a matrix has another
                format than the kernel's; nothing changes.
        """
        self._put(layer, expert, self.pack(weights, self.forms[layer], pause))

    def unload(self, layer: int, expert: int) -> None:
        """Drop an expert replica, if it is held: later batches lack it. Call it in the loading thread."""
        packed = self._packed.pop((layer, expert), None)
        self._bytes -= packed.nbytes if packed else 0

    @abc.abstractmethod
    def pack(self, weights: ExpertWeights, form: ExpertForm, pause: Pause) -> Sized:
        """Copy an expert into this kernel's layout; calls `pause` before each piece.

        Raises:
            CheckpointError: A weight to be quantised or a scale is NaN or infinite, or a matrix has another
                format than the kernel's.
        """

    def __call__(
        self,
        x_TH: torch.Tensor,
        expert_ids_TK: torch.Tensor,
        scores_TK: torch.Tensor,
        layer: int,
    ) -> torch.Tensor:
        """Compute the loop's batch: each token's weighted sum over its experts held here, float32 (T, H).

        The client adds up the sums of all servers.

        One caller at a time. The result may be in scratch memory: it is valid until the next call.

        Args:
            x_TH: Hidden states, any float dtype; T may be 0.
            expert_ids_TK: Logical experts, any integer dtype; -1 means "none here".
            scores_TK: Router scores, float32.
            layer: MoE layer.

        Raises:
            LookupError: An expert is not held; names the layer and the expert.
            ValueError: The shapes do not match.
        """
        if not 0 <= layer < len(self.forms):
            raise LookupError(f"layer {layer}: the model has MoE layers 0 to {len(self.forms) - 1}")
        if not (
            x_TH.dim() == expert_ids_TK.dim() == 2
            and len(x_TH) == len(expert_ids_TK)
            and scores_TK.shape == expert_ids_TK.shape
        ):
            raise ValueError(
                f"x {tuple(x_TH.shape)}, ids {tuple(expert_ids_TK.shape)}, "
                f"scores {tuple(scores_TK.shape)}: want (T, H), (T, K), (T, K)"
            )
        return self.compute(x_TH, expert_ids_TK, scores_TK, layer)

    @abc.abstractmethod
    def compute(
        self, x_TH: torch.Tensor, ids_TK: torch.Tensor, scores_TK: torch.Tensor, layer: int
    ) -> torch.Tensor:
        """Compute a batch whose layer and shapes `__call__` has checked; raises LookupError as it does."""

    def close(self) -> None:
        """Free the kernel's threads and memory, at the server's end or after a failed trial. Idempotent."""
        self._packed.clear()
        self._bytes = 0

    def _put(self, layer: int, expert: int, packed: Sized) -> None:
        self.unload(layer, expert)
        self._packed[layer, expert] = packed
        self._bytes += packed.nbytes

    @staticmethod
    def _not_held(layer: int, expert: int) -> LookupError:
        return LookupError(f"layer {layer}: expert {expert} is not held here")
