"""All errors of the project.

Each class states when it is raised and what the caller can do. Every message is one line that names the thing
and the remedy: the command line prints that line and exits with code 2.
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
    "DeviceFullError",
    "DeviceLostError",
    "EaasError",
    "ExpertMismatchError",
    "ExpertsUnavailableError",
    "GradientError",
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
    """Base class of all errors of the project."""


# -- user input -----------------------------------------------------------------------------------


class ConfigError(EaasError):
    """A setting is wrong or unknown. Change the setting named in the message."""


class TrafficError(EaasError):
    """A traffic trace cannot be read. Fix or delete the line named in the message."""


class CheckpointError(EaasError):
    """The checkpoint cannot be served. The message names the file or the expert."""


class NotACheckpointError(CheckpointError):
    """The path has no Hugging Face checkpoint (config.json or safetensors missing). Give another path."""


class DenseModelError(CheckpointError):
    """The model has no routed experts. Serve it with another engine."""


class UnsupportedModelError(CheckpointError):
    """The experts cannot be separated from the model (custom expert code, or quantised)."""


class MissingShardError(CheckpointError):
    """The index names a missing shard or tensor. Complete the download."""


class CorruptShardError(CheckpointError):
    """A shard is truncated or has a broken header. Download the shard again."""


class ExpertMismatchError(CheckpointError):
    """An expert's bytes differ from those of other replicas. Copy the checkpoint again."""


class DeviceFullError(CheckpointError):
    """The device has no memory left for an expert. Lower expert_server.memory_bytes, or add servers."""


class TraceError(EaasError):
    """A routing trace cannot be read (gaps, negative values, wrong shape) or written.

    The message names the file and the position in it.
    """


class GradientError(EaasError):
    """A gradient is asked of a model whose experts are remote. Call it under torch.no_grad()."""


class PortInUseError(EaasError):
    """The port is in use. Choose another port or stop the process that uses it."""


class SharedMemoryError(EaasError):
    """/dev/shm has too little space, or an arena cannot be attached."""


class DeviceLostError(EaasError):
    """An expert server's GPU failed. The server ends, and replicas answer; start it again."""


class ClusterError(EaasError):
    """A process of the cluster did not start or cannot be reached."""


class StoreError(EaasError):
    """The monitor's store cannot be read or written."""


# -- data path ----------------------------------------------------------------------------------------


class ConnectionLostError(EaasError):
    """The connection to an expert server is lost. The dispatcher retries on another replica."""


class SlotsBusyError(EaasError):
    """The connection to an expert server has no free slot. The dispatcher tries another replica, or waits."""


class SlotCorruptError(EaasError):
    """A slot has a wrong header, length or checksum. None of its data was used."""


class WrongRequestError(EaasError):
    """An expert server answered INVALID_ARGUMENT (hidden size, dtype). The request is not retried."""


class ExpertsUnavailableError(EaasError):
    """No live replica answered within the layer's deadline. Start a server that holds the experts.

    Attributes:
        layer: Index among the MoE layers.
        experts: Logical experts of that layer without an answer.
    """

    def __init__(self, layer: int, experts: Sequence[int], reason: str) -> None:
        names = ", ".join(map(str, experts[:8])) + (", ..." if len(experts) > 8 else "")
        super().__init__(f"layer {layer}: no live replica of expert(s) {names}: {reason}")
        self.layer = layer
        self.experts = tuple(experts)
