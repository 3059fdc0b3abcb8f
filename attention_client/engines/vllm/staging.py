"""Copies of hidden states between the device that runs attention and the memory that goes to the servers.

On the CPU nothing is copied. On a GPU the tensors pass through pinned memory, in the stream of the forward
pass, and the host waits for one event, instead of a synchronisation for each tensor. No GPU has run this yet.
"""

from __future__ import annotations

import torch

__all__ = ["Staging"]


class Staging:
    """Copies the inputs of a layer call to the host and its result back. For one thread."""

    def __init__(self) -> None:
        self._pinned: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._arrived: torch.cuda.Event | None = None

    def to_host(
        self, x_TH: torch.Tensor, ids_TK: torch.Tensor, scores_TK: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the inputs in host memory: themselves, or copies that are valid until the next call."""
        if x_TH.is_cpu:
            return x_TH, ids_TK, scores_TK
        copies = tuple(
            self._buffer(place, tensor).copy_(tensor, non_blocking=True)
            for place, tensor in enumerate((x_TH, ids_TK, scores_TK))
        )
        if self._arrived is None:
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._arrived.record()
        self._arrived.synchronize()
        return copies  # type: ignore[return-value]

    def to_device(self, out_TH: torch.Tensor, like_TH: torch.Tensor) -> torch.Tensor:
        """Return a result (T, H) on the device of `like_TH`."""
        if like_TH.is_cpu:
            return out_TH
        # The next call writes here only after its own event, which is later in this stream.
        pinned = self._buffer(3, out_TH).copy_(out_TH)
        return pinned.to(like_TH.device, non_blocking=True)

    def _buffer(self, place: int, like: torch.Tensor) -> torch.Tensor:
        key = (place, like.dtype)
        flat = self._pinned.get(key)
        if flat is None or flat.numel() < like.numel():
            flat = self._pinned[key] = torch.empty(like.numel(), dtype=like.dtype, pin_memory=True)
        return flat[: like.numel()].view(like.shape)
