"""The device that kernel `triton` computes on: a GPU (`cuda.py`), or the CPU with Triton's interpreter.

All copies to and from a device and all waits for it go through this interface, so that a test can count them.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import torch

__all__ = ["Device", "Event", "Interpreter"]


class Event(abc.ABC):
    """A mark in a stream, for the host to wait for; it may be used again after that."""

    @abc.abstractmethod
    def record(self) -> None:
        """Put the mark behind what was issued so far in the current stream."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Block until the device has passed the mark; returns at once if there is none yet."""


class Device(abc.ABC):
    """Memory and streams of a device. Copies are issued in the current stream, and do not wait.

    Attributes:
        name: What the server's start message shows.
        at: Where the device's tensors lie.
        can_capture: Whether `capture` saves time.
    """

    name: str
    at: torch.device
    can_capture: ClassVar[bool] = False

    @abc.abstractmethod
    @contextmanager
    def batch(self) -> Iterator[None]:
        """Order what the block issues in the stream of batches; for the thread that computes.

        If the block fails, all that it issued has ended before the error is raised.

        Raises:
            DeviceLostError: The device has failed, and computes no other batch either.
        """

    @abc.abstractmethod
    def finish(self) -> None:
        """Wait for the stream of batches: a batch's only wait."""

    @abc.abstractmethod
    def capture(self, issue: Callable[[], None]) -> Callable[[], None]:
        """Record what a function issues within `batch`; return what issues the same again, at once.

        The same: operators on the same memory, in which only the contents may differ. The function issues
        no copy from or to the host, and does not wait. It is called twice, and `capture` itself waits.

        Raises:
            RuntimeError: It cannot be recorded. Batches go on as before.
        """

    @abc.abstractmethod
    @contextmanager
    def loading(self) -> Iterator[None]:
        """Order what the block issues in the stream of loads; when it ends, the device has it all.

        Raises:
            DeviceLostError: The device has failed.
        """

    @abc.abstractmethod
    def event(self) -> Event:
        """Make an event for the stream of loads."""

    @abc.abstractmethod
    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate memory of the device, for the current stream.

        Raises:
            torch.OutOfMemoryError: There is none.
        """

    @abc.abstractmethod
    def pinned(self, nbytes: int) -> torch.Tensor:
        """Allocate page-locked memory of the host, uint8 (nbytes,), which the device reads and writes."""

    @abc.abstractmethod
    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Issue a copy between the device and pinned memory: contiguous tensors of one dtype.

        The host must leave both alone until it has waited.
        """

    @abc.abstractmethod
    def pin(self, memory: torch.Tensor) -> None:
        """Page-lock memory of this process for `copy`.

        Raises:
            OSError: The driver refuses.
        """

    @abc.abstractmethod
    def unpin(self, memory: torch.Tensor) -> None:
        """End `pin`. The device must not use the memory any more."""

    @abc.abstractmethod
    def free_bytes(self) -> int | None:
        """Return the bytes of the device's memory that are free; None: it has no memory of its own."""


class _Passed(Event):
    """An event where copies are complete when they return."""

    def record(self) -> None:
        """Do nothing."""

    def wait(self) -> None:
        """Do nothing."""


class Interpreter(Device):
    """CPU tensors and TRITON_INTERPRET=1: right, and slow."""

    name = "interpreted"
    at = torch.device("cpu")

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Silence NumPy, which computes in the interpreter: a GPU does not warn of infinities either."""
        with np.errstate(all="ignore"):
            yield

    def finish(self) -> None:
        """Do nothing: all is complete when it returns."""

    def capture(self, issue: Callable[[], None]) -> Callable[[], None]:
        """Return the function itself."""
        return issue

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Do nothing."""
        yield

    def event(self) -> Event:
        """Return an event that has passed."""
        return _Passed()

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate the host's memory."""
        return torch.empty(shape, dtype=dtype)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Allocate memory; there is no device to lock it for."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copy at once."""
        to.copy_(source)

    def pin(self, memory: torch.Tensor) -> None:
        """Do nothing."""

    def unpin(self, memory: torch.Tensor) -> None:
        """Do nothing."""

    def free_bytes(self) -> int | None:
        """Return None: experts take the host's memory."""
        return None
