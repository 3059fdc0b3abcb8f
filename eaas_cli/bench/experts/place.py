"""What differs between the places where `eaas bench experts` measures: a CPU, or a GPU."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from eaas_cli.bench.experts.source import Batch, Source
from expert_server.kernels.kernel import ExpertKernel, KernelSpec
from expert_server.weights.weights import ExpertForm

__all__ = ["Compute", "Place", "Way"]

_T = TypeVar("_T")
Compute = Callable[[Batch], torch.Tensor]


@dataclass(frozen=True)
class Way:
    """One way to measure a limit.

    Attributes:
        amount: Bytes or FLOP of a call.
        call: Does it.
    """

    amount: int
    call: Callable[[], object]


class Place(abc.ABC):
    """Where kernels compute, and how calls are timed there.

    Attributes:
        at: Where the batches lie.
        kernels: Makes of the kernels that take part, by name.
        has_auto: Whether `auto` takes part.
        baselines: Names of what the kernels are compared with.
        warm_ups: Calls of an implementation before the first that is timed.
    """

    at: torch.device
    kernels: Mapping[str, Callable[[Sequence[ExpertForm], KernelSpec], ExpertKernel]]
    has_auto: bool
    baselines: tuple[str, ...]
    warm_ups: int

    @abc.abstractmethod
    def timed(self, call: Callable[[], _T]) -> tuple[float, _T]:
        """Call a function; return the seconds until its work is done, and its answer."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Wait until the last call no longer slows the next one."""

    @abc.abstractmethod
    def ways_to_read(self) -> dict[str, Way]:
        """Return ways to read memory, of which the fastest is the limit; each leaves the caches cold."""

    @abc.abstractmethod
    def ways_to_multiply(self, dtype: torch.dtype) -> dict[str, Way]:
        """Return ways to multiply matrices of a dtype, of which the fastest is the limit."""

    @abc.abstractmethod
    def compute(self, kernel: ExpertKernel, batch: Batch) -> torch.Tensor:
        """Compute a batch in layer 0 of a kernel of this place."""

    @abc.abstractmethod
    def baseline(self, name: str, source: Source) -> Compute:
        """Return what computes batches as a baseline does.

        Raises:
            UnsupportedError: It does not work here.
        """

    @abc.abstractmethod
    def free_bytes(self) -> int:
        """Return the bytes of memory that are free for weights and batches."""

    @abc.abstractmethod
    def describe(self) -> dict[str, Any]:
        """Return what the document's entry `machine` says only of this place."""
