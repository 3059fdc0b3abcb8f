"""States how much memory a model takes on this machine before it is loaded; refuses what does not fit."""

from __future__ import annotations

from dataclasses import dataclass

from eaas.checkpoint.files import CheckpointFiles
from eaas.errors import ConfigError

__all__ = ["MemoryNeed", "memory_need"]

_GB = 1e9
# Parts of the bytes of bfloat16 weights, scales included.
_PARTS = {"none": 1.0, "int8": 0.51, "int4": 0.27}


@dataclass(frozen=True)
class MemoryNeed:
    """Memory for the weights of a model, from its headers.

    Attributes:
        experts: Bytes of one replica of every routed expert.
        replicas: Replicas of each expert.
        others: Bytes of the other weights, in the attention client.
    """

    experts: int
    replicas: int
    others: int

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
        """Raise ConfigError if the weights take more than the free memory, in bytes."""
        if self.total <= free:
            return
        fewer = self.experts + self.others <= free and self.replicas > 1
        remedy = "give --redundancy 1" if fewer else "give --quantization int4, or more machines"
        raise ConfigError(
            f"the model takes {self.total / _GB:.1f} GB of memory ({self}), and {free / _GB:.1f} GB are "
            f"free: {remedy}"
        )


def memory_need(files: CheckpointFiles, replicas: int, quantization: str) -> MemoryNeed:
    """Add up the weights by the names of their tensors; of an unusual model all count as other weights.

    Args:
        files: Files of the checkpoint.
        replicas: Replicas of each expert in the cluster.
        quantization: `expert_server.quantization`.
    """
    experts = sum(
        entry.nbytes for name, entry in files.tensors.items() if ".experts." in f".{name}."
    )
    others = sum(entry.nbytes for entry in files.tensors.values()) - experts
    return MemoryNeed(int(experts * _PARTS[quantization]), replicas, others)
