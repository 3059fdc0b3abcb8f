"""Every error that a caller can meet.

Each class states the condition that raises it and what the caller can do. All messages name the thing
and the remedy in one line, since the command line prints just that line and ends with exit code 2.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "CheckpointError",
    "ClusterError",
    "ConfigError",
    "ConnectionLostError",
    "CorruptShardError",
    "DenseModelError",
    "EaasError",
    "ExpertMismatchError",
    "ExpertsUnavailableError",
    "MissingShardError",
    "NotACheckpointError",
    "PortInUseError",
    "SharedMemoryError",
    "SlotCorruptError",
    "SlotsBusyError",
    "StoreError",
    "TraceError",
    "TrafficError",
    "UnsupportedModelError",
    "WrongRequestError",
]


class EaasError(Exception):
    """The root: whatever this project raises on purpose."""


# -- input of a person ------------------------------------------------------------------------------


class ConfigError(EaasError):
    """A setting is wrong or unknown. Change the setting that the message names."""


class TrafficError(EaasError):
    """A traffic trace cannot be read. Mend or leave out the line that the message names."""


class CheckpointError(EaasError):
    """The checkpoint cannot be served. Root of the following; the message names the file, or the expert."""


class NotACheckpointError(CheckpointError):
    """The path holds no Hugging Face checkpoint (no config.json or no safetensors). Give another path."""


class DenseModelError(CheckpointError):
    """The model has no experts. Serve it with another engine."""


class UnsupportedModelError(CheckpointError):
    """The model's experts cannot be taken out (own experts code, or quantised). The message says which."""


class MissingShardError(CheckpointError):
    """The index names a shard or a tensor that is not there. Complete the download."""


class CorruptShardError(CheckpointError):
    """A shard is truncated or its header is broken. Fetch the shard again."""


class ExpertMismatchError(CheckpointError):
    """The bytes of an expert are not those of the cluster's other replicas. Copy the checkpoint again."""


class TraceError(EaasError):
    """A file holds no routing trace, or a wrong one (holes, negatives, another shape), or none can be written
    there. The message names the file and the place in it."""


class PortInUseError(EaasError):
    """The port is taken. Choose another port or stop what holds it."""


class SharedMemoryError(EaasError):
    """/dev/shm has not enough room, or an arena cannot be attached. The message says what was asked."""


class ClusterError(EaasError):
    """A process of the cluster did not come up or cannot be reached."""


class StoreError(EaasError):
    """What the monitor is to remember cannot be read or written. The message says where, and the remedy."""


# -- data path ----------------------------------------------------------------------------------------


class ConnectionLostError(EaasError):
    """The server of this connection is gone. The dispatcher sends the pairs to another replica."""


class SlotsBusyError(EaasError):
    """No slot of the connection is free. The dispatcher tries another replica, or waits."""


class SlotCorruptError(EaasError):
    """A header, a length or a checksum in a slot is wrong. Nothing of the slot was used."""


class WrongRequestError(EaasError):
    """INVALID_ARGUMENT: the request itself is wrong (hidden size, dtype). Never sent again."""


class ExpertsUnavailableError(EaasError):
    """No live replica answered within the layer's deadline. Start a server that holds the experts.

    Attributes:
        layer: MoE layer (counted over MoE layers only).
        experts: Logical experts of that layer that nobody answered for.
    """

    def __init__(self, layer: int, experts: Sequence[int], reason: str) -> None:
        names = ", ".join(map(str, experts[:8])) + (", ..." if len(experts) > 8 else "")
        super().__init__(f"layer {layer}: no live replica of expert(s) {names}: {reason}")
        self.layer = layer
        self.experts = tuple(experts)
