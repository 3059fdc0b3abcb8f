"""Copies of hidden states between the device that runs attention and the memory that goes to the servers.

On the CPU nothing is copied. From a GPU, the tensors of many tokens pass through pinned memory, in the stream
of the forward pass, and the host waits for one event. For a few tokens that takes longer than plain copies.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

__all__ = ["Staged", "Staging"]

_RESULT = "result"
# Below this, a copy from the GPU takes less time than the calls around pinned memory: 45 and 69 us for one
# token, 143 and 85 us for 512 KiB (H100).
_PLAIN_BYTES = 64 << 10


class _Pinned:
    """Pinned memory of one layer call at a time, for one device; it grows with the calls."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._memory: dict[object, torch.Tensor] = {}
        self._arrived: torch.cuda.Event | None = None
        # Of the last result. Two events, since the next call may be in another stream.
        self._left: torch.cuda.Event | None = None

    def to_host(self, tensors: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """Copy tensors of the device's current stream to the host, and wait until they are there."""
        copies = tuple(
            self._place(place, tensor).copy_(tensor, non_blocking=True)
            for place, tensor in enumerate(tensors)
        )
        self._arrived = _recorded(self._arrived, self._device)
        self._arrived.synchronize()
        return copies

    def to_device(self, out_TH: torch.Tensor) -> torch.Tensor:
        """Copy a result to the device, in its current stream; the host does not wait."""
        if self._left is not None:
            # Wait until the device has read the previous result. In one stream it already has.
            self._left.synchronize()
        copy = self._place(_RESULT, out_TH).copy_(out_TH).to(self._device, non_blocking=True)
        self._left = _recorded(self._left, self._device)
        return copy

    def _place(self, name: object, like: torch.Tensor) -> torch.Tensor:
        key = (name, like.dtype)
        flat = self._memory.get(key)
        if flat is None or flat.numel() < like.numel():
            flat = self._memory[key] = torch.empty(like.numel(), dtype=like.dtype, pin_memory=True)
        return flat[: like.numel()].view(like.shape)


def _recorded(event: torch.cuda.Event | None, device: torch.device) -> torch.cuda.Event:
    """Record an event in the device's current stream; make it first, if there is none."""
    if event is None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    # Without an argument it would be the stream of the current device, which may be another one.
    event.record(torch.cuda.current_stream(device))
    return event


class Staged:
    """The tensors of one layer call in host memory, until `to_device` or `drop`.

    Args:
        tensors: In host memory.
        device: Device of the forward pass.
        pinned: Memory that holds the tensors; None: they have their own.
        give_back: Takes the memory for a later call.

    Attributes:
        tensors: In host memory; valid until the call ends.
    """

    def __init__(
        self,
        tensors: tuple[torch.Tensor, ...],
        device: torch.device,
        pinned: _Pinned | None = None,
        give_back: Callable[[_Pinned], None] | None = None,
    ) -> None:
        self.tensors = tensors
        self._device = device
        self._pinned = pinned
        self._give_back = give_back

    def to_device(self, out_TH: torch.Tensor) -> torch.Tensor:
        """End the call; return its result (T, H) on the device of the forward pass."""
        if self._pinned is None:
            return out_TH.to(self._device)
        result_TH = self._pinned.to_device(out_TH)
        self.drop()
        return result_TH

    def drop(self) -> None:
        """End the call without a result. Idempotent."""
        pinned, self._pinned = self._pinned, None
        if pinned is not None and self._give_back is not None:
            self._give_back(pinned)


class Staging(threading.local):
    """Brings the tensors of layer calls to the host, each call in memory of its own. State is per thread."""

    def __init__(self) -> None:
        # By device, since an event belongs to one.
        self._free: dict[torch.device, list[_Pinned]] = {}

    def to_host(self, *tensors: torch.Tensor) -> Staged:
        """Bring a call's tensors, which are on one device, to host memory: themselves, or copies."""
        device = tensors[0].device
        if device.type == "cpu":
            return Staged(tensors, device)
        is_small = sum(tensor.nbytes for tensor in tensors) <= _PLAIN_BYTES
        # Other accelerators have no events of torch.cuda.
        if is_small or device.type != "cuda":
            return Staged(tuple(tensor.cpu() for tensor in tensors), device)
        free = self._free.setdefault(device, [])
        pinned = free.pop() if free else _Pinned(device)
        return Staged(pinned.to_host(tensors), device, pinned, free.append)
