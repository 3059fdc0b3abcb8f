"""A GPU, through torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from eaas.errors import DeviceLostError
from eaas.log import get_logger
from expert_server.kernels.gpu.device import Device, Event, Interpreter
from expert_server.kernels.on_device import check_gpu, is_interpreted

__all__ = ["Gpu", "find_device"]

_log = get_logger(__name__)


class Gpu(Device):
    """The GPU cuda or cuda:N.

    Batches have a stream of high priority, loads one of low priority. Batches use memory of a load only after
    `loading` has waited, and the kernel keeps what a batch reads until `finish` has waited: torch's allocator
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
        """Issue in the stream of batches (`Device.batch`)."""
        with torch.cuda.stream(self._batches):
            try:
                yield
            except BaseException:
                self._wait_for(self._batches)
                raise

    def finish(self) -> None:
        """Wait for an event behind the batch (`Device.finish`)."""
        self._batch_ends.record(self._batches)
        self._batch_ends.synchronize()

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

    def event(self) -> Event:
        """Make an event whose wait sleeps: a load must not take a core from the loop (`Device.event`)."""
        return _CudaEvent()

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        """Allocate with torch's allocator, which keeps freed memory for the stream (`Device.empty`)."""
        return torch.empty(shape, dtype=dtype, device=self.at)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Allocate with torch's allocator of pinned memory (`Device.pinned`)."""
        with torch.cuda.device(self.at):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Issue cudaMemcpyAsync (`Device.copy`)."""
        to.copy_(source, non_blocking=True)

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


class _CudaEvent(Event):
    def __init__(self) -> None:
        self._event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """Record it in the current stream."""
        self._event.record()

    def wait(self) -> None:
        """Sleep until it has passed."""
        self._event.synchronize()


def find_device(name: str) -> Device:
    """Return the device of a setting, cuda or cuda:N; the interpreter, if that stands in for a GPU.

    Raises:
        ConfigError: There is no such GPU.
    """
    if is_interpreted():
        return Interpreter()
    check_gpu(name)
    return Gpu(name)
