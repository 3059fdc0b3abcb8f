"""A device that counts copies and waits, and on which nothing is done before the host has waited for it.

It computes in Triton's interpreter. What only a GPU would punish fails here:

- the host reads memory of the device, or mixes it with its own in one operator;
- a copy from or to memory that is not page-locked, or outside of a stream's block;
- a result is read before the wait, or a buffer is filled again before its last copy has ended: copies back,
  and copies of loads, happen at the wait;
- a buffer of a batch changes between its copy to the device and the wait. Slots may: they are the clients'.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eaas.errors import DeviceLostError
from expert_server.kernels.gpu.device import Device

__all__ = ["FakeDevice", "Waits"]

_READS = {
    torch.Tensor.numpy,
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.cpu,
    torch.Tensor.__bool__,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
    torch.Tensor.__array__,
    torch.Tensor.__contains__,
    torch.Tensor.__iter__,
    torch.equal,
    torch.Tensor.equal,
}


class OnDevice(torch.Tensor):
    """Memory of the device: operators give more of it, and the host cannot look into it."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READS:
            raise AssertionError(f"{func.__name__}: the host reads memory of the device")
        for each in tree_leaves((args, kwargs)):
            if isinstance(each, torch.Tensor) and not isinstance(each, cls) and each.dim():
                raise AssertionError(f"{func.__name__}: memory of the device and of the host")
        return super().__torch_function__(func, types, args, kwargs or {})


class _Creates(TorchFunctionMode):
    """Operators that create a tensor, create it on the device."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        created = func(*args, **(kwargs or {}))
        return created.as_subclass(OnDevice) if func is torch.arange else created


class FakeDevice(Device):
    """See the module.

    Args:
        can_pin: Whether `pin` succeeds.
        can_capture: Whether batches are captured.
        free: Bytes of `free_bytes`.

    Attributes:
        calls: Number of "copy to", "copy back", "wait" (of a batch), "piece" (of a load), "wait of a load"
            (for all of it), "wait for a buffer", "capture" and "replay".
        pinned_bytes: Bytes of the slots that are page-locked now.
        is_lost: Whether a batch that fails is the last; loads then fail.
        fails: Called before each copy, with the number of copies so far.
    """

    name = "fake"

    def __init__(
        self, can_pin: bool = True, free: int | None = None, can_capture: bool = False
    ) -> None:
        self.can_capture = can_capture
        self.calls: Counter[str] = Counter()
        self.fails: Callable[[int], object] = lambda _copies: None
        self.is_lost = False
        self.pinned_bytes = 0
        self._can_pin, self._free = can_pin, free
        self._current = threading.local()
        # Of the batch: what happens at the wait. Of loads: the same, in order, and how many have happened.
        self._back: list[Callable[[], object]] = []
        # The batch's buffers that are on their way to the device, and what they contained.
        self._sent: list[tuple[npt.NDArray[np.uint8], bytes]] = []
        self._loads: list[Callable[[], object]] = []
        self._loaded = 0
        self._pinned: list[tuple[int, int]] = []
        # Kept, so that no other memory gets its address.
        self._memory: list[torch.Tensor] = []

    # -- streams --------------------------------------------------------------------------------------

    @property
    def _stream(self) -> str:
        return getattr(self._current, "stream", "")

    @contextmanager
    def _within(self, stream: str) -> Iterator[None]:
        assert not self._stream
        self._current.stream = stream
        try:
            yield
        finally:
            self._current.stream = ""

    @contextmanager
    def batch(self) -> Iterator[None]:
        with self._within("batch"), super().batch(), _Creates():
            try:
                yield
                self.calls["wait"] += 1
                self._flush()
            except BaseException as error:
                self._flush()
                if self.is_lost:
                    raise DeviceLostError("fake failed") from error
                raise

    def _flush(self) -> None:
        for copy in self._back:
            copy()
        self._back.clear()
        sent, self._sent = self._sent, []
        for host, before in sent:
            assert host.tobytes() == before, "a buffer changed before the device had read it"

    def capture(self, issue: Callable[[], None]) -> Callable[[], None]:
        assert self._stream == "batch"
        self.calls["capture"] += 1
        # A copy or a wait cannot be captured.
        self._current.stream = "capture"
        try:
            issue()
        finally:
            self._current.stream = "batch"

        def replay() -> None:
            assert self._stream == "batch"
            self.calls["replay"] += 1
            issue()

        return replay

    @contextmanager
    def loading(self) -> Iterator[None]:
        with self._within("loading"):
            try:
                yield
            finally:
                self.calls["wait of a load"] += 1
                self._pass(len(self._loads))
                if self.is_lost:
                    raise DeviceLostError("fake failed")

    def mark(self) -> Callable[[], None]:
        mark = len(self._loads)

        def wait() -> None:
            assert self._stream == "loading"
            self.calls["wait for a buffer"] += mark > self._loaded
            self._pass(mark)

        return wait

    def _pass(self, mark: int) -> None:
        for copy in self._loads[self._loaded : mark]:
            copy()
        self._loaded = max(self._loaded, mark)

    # -- memory ---------------------------------------------------------------------------------------

    def empty(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        assert self._stream
        return super().empty(*shape, dtype=dtype).as_subclass(OnDevice)

    def pinned(self, nbytes: int) -> torch.Tensor:
        memory = super().pinned(nbytes)
        self._memory.append(memory)
        self._pinned.append((memory.data_ptr(), nbytes))
        return memory

    def pin(self, memory: torch.Tensor) -> None:
        if not self._can_pin:
            raise OSError("cudaHostRegister: out of memory")
        self._pinned.append((memory.data_ptr(), memory.nbytes))
        self.pinned_bytes += memory.nbytes

    def unpin(self, memory: torch.Tensor) -> None:
        self._pinned.remove((memory.data_ptr(), memory.nbytes))
        self.pinned_bytes -= memory.nbytes

    def free_bytes(self) -> int | None:
        return self._free

    @staticmethod
    def _lies_in(part: torch.Tensor, memory: torch.Tensor) -> bool:
        return 0 <= part.data_ptr() - memory.data_ptr() < memory.nbytes

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        assert self._stream in ("batch", "loading")
        assert to.is_contiguous()
        assert source.is_contiguous()
        assert to.dtype is source.dtype
        is_back = isinstance(source, OnDevice)
        host, device = (to, source) if is_back else (source, to)
        assert isinstance(device, OnDevice)
        assert not isinstance(host, OnDevice)
        begin, end = host.data_ptr(), host.data_ptr() + host.nbytes
        assert any(at <= begin and end <= at + size for at, size in self._pinned), "not page-locked"
        kind = "piece" if self._stream == "loading" else "copy back" if is_back else "copy to"
        self.calls[kind] += 1
        self.fails(sum(self.calls[each] for each in ("piece", "copy to", "copy back")))
        device = device.as_subclass(torch.Tensor)
        if kind == "copy to" and any(self._lies_in(host, each) for each in self._memory):
            # As bytes, since NaN is not equal to itself, and not in torch, whose operators tests look at.
            as_bytes = host.view(-1).view(torch.uint8).numpy()
            self._sent.append((as_bytes, as_bytes.tobytes()))

        def happen(to: torch.Tensor = host if is_back else device) -> None:
            with torch.inference_mode():
                to.copy_(device if is_back else host)

        if self._stream == "loading":
            self._loads.append(happen)
        elif is_back:
            self._back.append(happen)
        else:
            happen()


# Operators whose result's shape or value the host needs: with a GPU, they wait for it.
WAITING = {
    "aten::_local_scalar_dense",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_dim",
    "aten::_unique2",
    "aten::repeat_interleave",
}


class Waits(TorchDispatchMode):
    """Lists the operators that would wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        self.operators += 1
        # A mask as an index is turned into numbers.
        is_mask = name.startswith("aten::index") and any(
            each is not None and each.dtype is torch.bool for each in args[1]
        )
        if name in WAITING or is_mask:
            self.names.append(name)
        return func(*args, **(kwargs or {}))
