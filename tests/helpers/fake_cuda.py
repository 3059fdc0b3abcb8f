"""A GPU without one: tensors that say they lie on it, copies that are late, and counted waits.

    with FakeCuda() as cuda:
        x = cuda.tensor(torch.ones(3))   # x.is_cuda
        ...
    assert cuda.waits == {"event": 1}

A copy that need not wait is put off until the host waits for it, and host memory that it will write is
spoiled until then. So code that reads too early, or overwrites what was not copied yet, computes wrong
numbers. An operator between host and device fails, as on a GPU. There are two devices, each with a current
stream; cuda:0 is the current device.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

__all__ = ["DeviceTensor", "FakeCuda"]

_ATEN = torch.ops.aten


class DeviceTensor(torch.Tensor):
    """A tensor on a device, cuda:0 or cuda:1, whose values are in `memory`, on the host."""

    memory: torch.Tensor

    @staticmethod
    def __new__(cls, memory: torch.Tensor, device: torch.device) -> Self:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls, memory.shape, strides=memory.stride(), dtype=memory.dtype, device=device
        )

    def __init__(self, memory: torch.Tensor, device: torch.device) -> None:
        self.memory = memory

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of FakeCuda")


class FakeCuda(TorchDispatchMode):
    """Two fake devices; their streams do nothing until the host waits for them.

    Attributes:
        waits: Waits of the host, by what it waits for: "event", "stream" or "device".
        copies: Copies that it does not wait for.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.copies = 0
        # The current stream of each device.
        self._current = [_Stream(0), _Stream(1)]
        self._streams = [*self._current]
        self._pinned: set[int] = set()
        self._patch = pytest.MonkeyPatch()

    def __enter__(self) -> Self:
        fake = self

        class Event:
            """Of torch.cuda; remembers its place in a stream, and belongs to that stream's device."""

            def __init__(self) -> None:
                self._stream: _Stream | None = None

            def record(self, stream: _Stream | None = None) -> None:
                stream = stream or fake._current[0]
                assert self._stream is None or self._stream.device == stream.device
                self._stream, self._place = stream, stream.end

            def synchronize(self) -> None:
                fake.waits["event"] += 1
                assert self._stream is not None
                self._stream.run_to(self._place)

        self._patch.setattr(torch.cuda, "_lazy_init", lambda: None)
        self._patch.setattr(torch.cuda, "Event", Event)
        self._patch.setattr(torch.cuda, "current_stream", self._stream_of)
        self._patch.setattr(
            torch.cuda, "synchronize", lambda: self._wait("device", self._current[0])
        )
        super().__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        super().__exit__(*failure)
        self._patch.undo()

    def tensor(self, values: torch.Tensor, device: str = "cuda:0") -> DeviceTensor:
        """Return a tensor of a device that is there already."""
        return DeviceTensor(values.clone(), torch.device(device))

    @contextmanager
    def other_stream(self) -> Iterator[None]:
        """Make another stream the current one of each device in the block."""
        before, self._current = self._current, [_Stream(0), _Stream(1)]
        self._streams += self._current
        try:
            yield
        finally:
            self._current = before

    def values(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a device tensor's values when all streams have ended, which is not counted."""
        assert isinstance(tensor, DeviceTensor)
        for stream in self._streams:
            stream.run_to(stream.end)
        return tensor.memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is _ATEN.copy_.default:
            return self._copy(*args)
        if func is _ATEN._to_copy.default:
            return self._to_copy(*args, **kwargs)
        if kwargs.get("pin_memory"):
            pinned: torch.Tensor = func(*args, **kwargs | {"pin_memory": False})
            self._pinned.add(pinned.untyped_storage().data_ptr())
            return pinned
        given = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        if not any(isinstance(each, DeviceTensor) for each in given):
            return func(*args, **kwargs)
        device = next(each.device for each in given if isinstance(each, DeviceTensor))
        stream = self._stream_of(device)
        if func is _ATEN._local_scalar_dense.default:
            self._wait("stream", stream)
        for each in given:
            assert each.device == device or not each.dim(), f"{func} of host and device"
        stream.run_to(stream.end)
        out = func(*tree_map(_memory, args), **tree_map(_memory, kwargs))
        return tree_map(lambda each: DeviceTensor(each, device) if _is_plain(each) else each, out)

    def _copy(
        self, to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        if isinstance(to, DeviceTensor) == isinstance(source, DeviceTensor):
            _memory(to).copy_(_memory(source))
            return to
        host, device = (source, to) if isinstance(to, DeviceTensor) else (to, source)
        stream = self._stream_of(device.device)
        self._issue(lambda: _memory(to).copy_(_memory(source)), host, stream, non_blocking)
        if non_blocking and host is to:
            to.fill_(77)
        return to

    def _to_copy(
        self, source: torch.Tensor, non_blocking: bool = False, **kwargs: Any
    ) -> torch.Tensor:
        device = kwargs.pop("device", None) or source.device
        kwargs.pop("pin_memory", None)
        to = torch.empty_like(_memory(source), dtype=kwargs.get("dtype"))
        stream = self._stream_of(device if device.type == "cuda" else source.device)
        if device.type == source.device.type:
            stream.run_to(stream.end)
            to.copy_(_memory(source))
            return DeviceTensor(to, device) if device.type == "cuda" else to
        if device.type == "cuda":
            self._issue(lambda: to.copy_(source), source, stream, non_blocking)
            return DeviceTensor(to, device)
        # Its result is in memory that is not pinned.
        self._issue(lambda: to.copy_(_memory(source)), to, stream, non_blocking)
        return to

    def _stream_of(self, device: torch.device | None = None) -> _Stream:
        return self._current[device.index or 0 if device is not None else 0]

    def _issue(
        self, copy: Callable[[], object], host: torch.Tensor, stream: _Stream, non_blocking: bool
    ) -> None:
        stream.pending.append(copy)
        if non_blocking and host.untyped_storage().data_ptr() in self._pinned:
            self.copies += 1
        else:
            self._wait("stream", stream)

    def _wait(self, what: str, stream: _Stream) -> None:
        self.waits[what] += 1
        stream.run_to(stream.end)


class _Stream:
    """Copies that are put off, in order.

    Attributes:
        device: Number of its device.
        pending: Those that are still to come.
    """

    def __init__(self, device: int) -> None:
        self.device = device
        self.pending: deque[Callable[[], object]] = deque()
        self._done = 0

    @property
    def end(self) -> int:
        """Number of all copies so far."""
        return self._done + len(self.pending)

    def run_to(self, place: int) -> None:
        """Carry out the copies before a place."""
        while self._done < place:
            self.pending.popleft()()
            self._done += 1


def _memory(each: Any) -> Any:
    return each.memory if isinstance(each, DeviceTensor) else each


def _is_plain(each: object) -> bool:
    return isinstance(each, torch.Tensor) and not isinstance(each, DeviceTensor)
