"""The device that kernel `triton` computes on: a GPU, or the CPU with Triton's interpreter.

All copies to and from a device and all waits for it are here.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from expert_server.kernels.on_device import check_gpu, is_interpreted

__all__ = ["Device", "Gpu", "Interpreter", "find_device"]


class Device(abc.ABC):
    """Copies between the host and a device.

    Attributes:
        name: What the server's start message shows.
        at: Where the device's tensors lie.
    """

    name: str
    at: torch.device

    @abc.abstractmethod
    @contextmanager
    def batch(self) -> Iterator[None]:
        """Order what the block issues in the stream of batches; for the thread that computes."""

    @abc.abstractmethod
    def send(self, host: torch.Tensor) -> torch.Tensor:
        """Copy a batch's input to the device, in the order of its stream; does not wait."""

    @abc.abstractmethod
    def receive(self, result: torch.Tensor) -> torch.Tensor:
        """Copy a batch's result to the host and wait for it: a batch's only wait."""

    @abc.abstractmethod
    @contextmanager
    def loading(self) -> Iterator[None]:
        """Order what the block issues in the stream of loads; when it ends, the device has it all."""

    @abc.abstractmethod
    def write(self, to: torch.Tensor, host: torch.Tensor) -> None:
        """Copy a piece of weights to the device, while loading; `host` may be reused at once."""


class Interpreter(Device):
    """CPU tensors and TRITON_INTERPRET=1: right, and slow."""

    name = "interpreted"
    at = torch.device("cpu")

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Silence NumPy, which computes in the interpreter: a GPU does not warn of infinities either."""
        with np.errstate(all="ignore"):
            yield

    def send(self, host: torch.Tensor) -> torch.Tensor:
        """Share the memory."""
        return host

    def receive(self, result: torch.Tensor) -> torch.Tensor:
        """Share the memory."""
        return result

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Do nothing: copies are complete when they return."""
        yield

    def write(self, to: torch.Tensor, host: torch.Tensor) -> None:
        """Copy."""
        to.copy_(host)


class Gpu(Device):
    """A GPU, cuda or cuda:N. Never run: no machine that tests this project has one.

    Batches have a stream of high priority, loads one of low priority. Host memory is pinned by torch's
    allocator, which reuses a piece once the copy from it has ended. Batches use memory of a load only after
    `loading` has waited, and the kernel keeps what a batch reads until `receive` has waited: the allocator
    need not know that both streams use it.
    """

    def __init__(self, name: str) -> None:
        self.at = torch.device(name)
        torch.cuda.set_device(self.at)
        self.name = torch.cuda.get_device_name(self.at)
        # The lower number comes first.
        self._batches = torch.cuda.Stream(priority=-1)  # type: ignore[no-untyped-call]
        self._loads = torch.cuda.Stream(priority=0)  # type: ignore[no-untyped-call]

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Issue in the stream of batches. A batch that fails midway has ended, too, once this returns."""
        with torch.cuda.stream(self._batches):
            try:
                yield
            except BaseException:
                self._batches.synchronize()
                raise

    def send(self, host: torch.Tensor) -> torch.Tensor:
        """Copy through pinned memory."""
        return host.pin_memory().to(self.at, non_blocking=True)

    def receive(self, result: torch.Tensor) -> torch.Tensor:
        """Copy to pinned memory, and wait for the stream of batches."""
        host = torch.empty(result.shape, dtype=result.dtype, pin_memory=True)
        host.copy_(result, non_blocking=True)
        self._batches.synchronize()
        return host

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Issue in the stream of loads, and wait for it."""
        with torch.cuda.stream(self._loads):
            yield
            self._loads.synchronize()

    def write(self, to: torch.Tensor, host: torch.Tensor) -> None:
        """Copy through pinned memory."""
        to.copy_(host.pin_memory(), non_blocking=True)


def find_device(name: str) -> Device:
    """Return the device of a setting, cuda or cuda:N; the interpreter, if that stands in for a GPU.

    Raises:
        ConfigError: There is no such GPU.
    """
    if is_interpreted():
        return Interpreter()
    check_gpu(name)
    return Gpu(name)
