"""States how much memory a model takes on this machine before it is loaded; refuses what does not fit."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from eaas.checkpoint.formats import USUAL
from eaas.errors import ConfigError

if TYPE_CHECKING:
    from eaas.checkpoint.files import CheckpointFiles
    from eaas.checkpoint.header import TensorEntry

__all__ = ["MemoryNeed", "memory_need"]

_GB = 1e9


@dataclass(frozen=True)
class MemoryNeed:
    """Memory for the weights of a model, from its headers.

    Attributes:
        experts: Bytes of one replica of every routed expert.
        replicas: Replicas of each expert.
        others: Bytes of the other weights, in all attention clients.
        smaller: Further values of --quantization, and the part of `experts` that each takes.
    """

    experts: int
    replicas: int
    others: int
    smaller: tuple[tuple[str, float], ...] = ()

    @property
    def total(self) -> int:
        """Bytes of all weights on this machine."""
        return self.experts * self.replicas + self.others

    def __str__(self) -> str:
        experts = f"experts {self.experts / _GB:.1f} GB"
        if self.replicas > 1:
            experts += f", {self.replicas} replicas {self.experts * self.replicas / _GB:.1f} GB"
        return f"{experts}; other weights {self.others / _GB:.1f} GB"

    def refuse_more_than(self, free: int) -> None:
        """Raise ConfigError if the weights take more than the free memory, in bytes; it names what fits."""
        if self.total <= free:
            return
        fitting = self._fitting(free)
        remedy = "no option makes it fit: take a machine with more memory, or several"
        if fitting:
            remedy = f"give {' or '.join(fitting)}, or take another machine"
        raise ConfigError(
            f"the model takes {self.total / _GB:.1f} GB of memory ({self}), and {free / _GB:.1f} GB are "
            f"free: {remedy}"
        )

    def _fitting(self, free: int) -> list[str]:
        """List the mildest options that fit: fewer replicas, or quantisation; both only if neither does."""
        fewer = range(self.replicas - 1, 0, -1)

        def first(choices: Iterable[tuple[str, int, float]]) -> list[str]:
            totals = ((o, self.experts * count * part + self.others) for o, count, part in choices)
            return [f"{o} ({total / _GB:.1f} GB)" for o, total in totals if total <= free][:1]

        return [
            *first((f"--redundancy {count}", count, 1.0) for count in fewer),
            *first((f"--quantization {q}", self.replicas, part) for q, part in self.smaller),
        ] or first(
            (f"--quantization {q} --redundancy {count}", count, part)
            for q, part in self.smaller
            for count in fewer
        )


def memory_need(
    files: CheckpointFiles, replicas: int, clients: int, quantization: str
) -> MemoryNeed:
    """Add up the weights by the names of their tensors; of an unusual model all count as other weights.

    Args:
        files: Files of the checkpoint.
        replicas: Replicas of each expert in the cluster.
        clients: Attention clients; the caller's own counts, too.
        quantization: `expert_server.quantization`.
    """
    experts = {n: entry for n, entry in files.tensors.items() if ".experts." in f".{n}."}
    # Codes and scales of a quantised checkpoint's experts stay as they are.
    stored = sum(e.nbytes if files.matrices else _computed(e, files) for e in experts.values())
    others = sum(_computed(e, files) for name, e in files.tensors.items() if name not in experts)
    others *= max(1, clients)
    sizes = {
        name: sum(usual.nbytes(*entry.shape) for entry in experts.values())
        for name, usual in USUAL.items()
        if usual.format.is_integer
    }
    now = sizes.get(quantization, stored)
    # A checkpoint that is quantised already stays as it is.
    choices = () if files.matrices else sizes.items()
    smaller = tuple((name, size / now) for name, size in choices if size < now)
    return MemoryNeed(now, replicas, others, smaller)


def _computed(entry: TensorEntry, files: CheckpointFiles) -> int:
    """Return the bytes of a tensor in memory. Clients and servers compute float16 in float32."""
    dtype = files.config.get("dtype", files.config.get("torch_dtype", "float16"))
    return entry.nbytes * (2 if entry.dtype == "F16" and dtype == "float16" else 1)
