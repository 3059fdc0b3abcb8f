"""The device that kernel `triton` computes on: a GPU, or the CPU with Triton's interpreter; and loads to it.

All copies to and from a device and all waits for it go through `Device`, so that a test can count them.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from eaas.checkpoint.pieces import PIECE_BYTES, pieces
from eaas.errors import DeviceFullError, DeviceLostError
from eaas.log import get_logger
from expert_server.kernels.on_device import check_gpu, is_interpreted

__all__ = ["Device", "Gpu", "Uploads", "find_device"]

_log = get_logger(__name__)


class Device:
    """Memory and streams of a device. Copies are issued in the current stream, and do not wait.

    This one is the CPU with TRITON_INTERPRET=1: right and slow, and all is complete once it is issued.

    Attributes:
        name: What the server's start message shows.
        at: Where the device's tensors lie.
        can_capture: Whether `capture` saves time.
    """

    name = "interpreted"
    at = torch.device("cpu")
    can_capture = False

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Order what the block issues in the stream of batches, and wait for it: a batch's only wait.

        For the thread that computes. If the block fails, all that it issued has ended before the error is
        raised.

        Raises:
            DeviceLostError: The device has failed, and computes no other batch either.
        """
        # NumPy computes here, and a GPU does not warn of infinities.
        with np.errstate(all="ignore"):
            yield

    def capture(self, issue: Callable[[], None]) -> Callable[[], None]:
        """Record what a function issues within `batch`; return what issues the same again, at once.

        The same: operators on the same memory, in which only the contents may differ. The function issues
        no copy from or to the host, and does not wait. It is called twice, and `capture` itself waits.

        Raises:
            RuntimeError: It cannot be recorded. Batches go on as before.
        """
        return issue

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Order what the block issues in the stream of loads; when it ends, the device has it all.

        Raises:
            DeviceLostError: The device has failed.
        """
        yield

    def mark(self) -> Callable[[], object]:
        """Mark what was issued so far in the stream of loads; return what waits for it."""
        return _pass

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate memory of the device, for the current stream.

        Raises:
            torch.OutOfMemoryError: There is none.
        """
        return torch.empty(shape, dtype=dtype, device=self.at)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Allocate page-locked memory of the host, uint8 (nbytes,), which the device reads and writes."""
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Issue a copy between the device and pinned memory: contiguous tensors of one dtype.

        The host must leave both alone until it has waited.
        """
        to.copy_(source, non_blocking=True)

    def pin(self, memory: torch.Tensor) -> None:
        """Page-lock memory of this process for `copy`.

        Raises:
            OSError: The driver refuses.
        """

    def unpin(self, memory: torch.Tensor) -> None:
        """End `pin`. The device must not use the memory any more."""

    def free_bytes(self) -> int | None:
        """Return the bytes of the device's memory that are free; None: it has no memory of its own."""
        return None


def _pass() -> None:
    """Do not wait: all has ended."""


class Gpu(Device):
    """The GPU cuda or cuda:N, through torch.

    Batches have a stream of high priority, loads one of low priority. Batches use memory of a load only after
    `loading` has waited, and the kernel keeps what a batch reads until `batch` has waited: torch's allocator
    need not know that both streams use it. Threads have a current GPU each: a stream's block sets it.
    """

    can_capture = True

    def __init__(self, name: str) -> None:
        device = torch.device(name)
        number = torch.cuda.current_device() if device.index is None else device.index
        self.at = torch.device("cuda", number)
        self.name = torch.cuda.get_device_name(self.at)
        # The lower number comes first.
        self._batches = torch.cuda.Stream(self.at, priority=-1)  # type: ignore[no-untyped-call]
        self._loads = torch.cuda.Stream(self.at, priority=0)  # type: ignore[no-untyped-call]
        # Waits by polling, as the loop does for requests.
        self._batch_ends = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # Graphs share memory for what lies between their inputs and results: one runs at a time.
        self._pool: Any = None

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Issue in the stream of batches, and wait for an event behind them (`Device.batch`)."""
        with torch.cuda.stream(self._batches):
            try:
                yield
                self._batch_ends.record(self._batches)
                self._batch_ends.synchronize()
            except BaseException:
                self._wait_for(self._batches)
                raise

    def capture(self, issue: Callable[[], None]) -> Callable[[], None]:
        """Capture a CUDA graph (`Device.capture`); waits for the whole device.

        Other threads load experts meanwhile, hence the mode "thread_local".
        """
        # Compiles device code and sets libraries up, which cannot be captured.
        issue()
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            with torch.cuda.device(self.at):
                self._pool = torch.cuda.graph_pool_handle()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._batches, capture_error_mode="thread_local"
        ):
            issue()
        replay: Callable[[], None] = graph.replay
        return replay

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Issue in the stream of loads, and wait for it (`Device.loading`)."""
        with torch.cuda.stream(self._loads):
            try:
                yield
            finally:
                self._wait_for(self._loads)

    def _wait_for(self, stream: torch.cuda.Stream) -> None:
        try:
            stream.synchronize()
        except RuntimeError as error:
            # Such an error stays until the process ends.
            raise DeviceLostError(f"{self.name} failed: {error}") from error

    def mark(self) -> Callable[[], object]:
        """Record an event whose wait sleeps: a load must not take a core from the loop (`Device.mark`)."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._loads)
        wait: Callable[[], object] = event.synchronize
        return wait

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Allocate with torch's allocator of pinned memory (`Device.pinned`)."""
        with torch.cuda.device(self.at):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def pin(self, memory: torch.Tensor) -> None:
        """Register the memory with the driver (`Device.pin`)."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.at):
            code = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
            if int(code) == 0:
                return
            # The runtime keeps the error, and torch would take it for that of its next launch.
            with contextlib.suppress(RuntimeError):
                torch.ones(1, device=self.at)
        raise OSError(f"cudaHostRegister: {runtime.cudaGetErrorString(code)}")

    def unpin(self, memory: torch.Tensor) -> None:
        """End the registration (`Device.unpin`). Its error is only logged: the process ends soon."""
        try:
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            with torch.cuda.device(self.at):
                runtime.cudaHostUnregister(memory.data_ptr())
        except RuntimeError as error:  # Of a device that is lost.
            _log.info("%s: the slots stay page-locked: %s", self.name, error)

    def free_bytes(self) -> int:
        """Return what the driver has, and what torch keeps unused (`Device.free_bytes`)."""
        free, _ = torch.cuda.mem_get_info(self.at)
        kept = torch.cuda.memory_reserved(self.at) - torch.cuda.memory_allocated(self.at)
        return int(free) + kept


def find_device(name: str) -> Device:
    """Return the device of a setting, cuda or cuda:N; the interpreter, if that stands in for a GPU.

    Raises:
        ConfigError: There is no such GPU.
    """
    if is_interpreted():
        return Device()
    check_gpu(name)
    return Gpu(name)


class Uploads:
    """Copies of a loading thread, through two buffers: the device reads one, the host fills the other."""

    def __init__(self, device: Device) -> None:
        self.device = device
        # With each buffer what waits until the device has read it.
        self._buffers: deque[tuple[torch.Tensor, Callable[[], object]]] = deque(
            (device.pinned(PIECE_BYTES), _pass) for _ in range(2)
        )

    @contextmanager
    def load(self) -> Iterator[None]:
        """`Device.loading`, for memory that the block allocates and writes.

        Raises:
            DeviceFullError: The device has no memory left for it.
            DeviceLostError: The device has failed.
        """
        try:
            with self.device.loading():
                yield
        except torch.OutOfMemoryError as error:
            raise DeviceFullError(
                f"{self.device.name} has no memory left for it: set expert_server.memory_bytes below what "
                "is free, or add servers"
            ) from error

    def write(self, to: torch.Tensor, host: torch.Tensor) -> None:
        """Issue the copy of bytes to the device, within `load`; `host` may be reused at once.

        Args:
            to: Memory of the device, uint8 (N,).
            host: Bytes, uint8 (N,).
        """
        for begin, end in pieces(len(host)):
            buffer, wait = self._buffers[0]
            wait()
            piece = buffer[: end - begin]
            piece.copy_(host[begin:end])
            self.device.copy(to[begin:end], piece)
            self._buffers[0] = buffer, self.device.mark()
            self._buffers.rotate()
