"""Copies weights to a device through two pinned buffers, while batches are served."""

from __future__ import annotations

import torch

from eaas.checkpoint.pieces import PIECE_BYTES, pieces
from expert_server.kernels.gpu.device import Device

__all__ = ["Uploads"]

_BUFFERS = 2


class Uploads:
    """Copies of a loading thread: while the device reads one buffer, the host fills the other.

    Args:
        device: The device.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._buffers = [device.pinned(PIECE_BYTES) for _ in range(_BUFFERS)]
        self._read = [device.event() for _ in range(_BUFFERS)]
        self._next = 0

    def write(self, to: torch.Tensor, host: torch.Tensor) -> None:
        """Issue the copy of bytes to the device, within `Device.loading`; `host` may be reused at once.

        Args:
            to: Memory of the device, uint8 (N,).
            host: Bytes, uint8 (N,).
        """
        for begin, end in pieces(len(host)):
            buffer, read = self._buffers[self._next], self._read[self._next]
            self._next = (self._next + 1) % _BUFFERS
            read.wait()
            piece = buffer[: end - begin]
            piece.copy_(host[begin:end])
            self.device.copy(to[begin:end], piece)
            read.record()
