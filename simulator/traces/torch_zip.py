"""Reads tensors from a file of `torch.save`, without torch and without unpickling.

Such a file is a zip archive:

    <name>/data.pkl      a pickle, protocol 2, of dictionaries, lists, numbers, texts and tensors
    <name>/byteorder     "little"
    <name>/data/<key>    the bytes of a storage

A pickle is a program for a small stack machine, and unpickling executes it. Here `pickletools.genops`, which
executes nothing, reads its opcodes, and only those for plain data are followed. Two names are allowed:
`torch._utils._rebuild_tensor_v2`, which becomes a view of a storage's bytes, and an empty
`collections.OrderedDict`. Any other name or opcode is refused.
"""

from __future__ import annotations

import pickletools
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from eaas.errors import TraceError

__all__ = ["read_torch_zip"]

_STORAGES = {
    "torch DoubleStorage": "<f8",
    "torch FloatStorage": "<f4",
    "torch HalfStorage": "<f2",
    "torch LongStorage": "<i8",
    "torch IntStorage": "<i4",
    "torch ShortStorage": "<i2",
    "torch CharStorage": "|i1",
    "torch ByteStorage": "|u1",
    "torch BoolStorage": "|b1",
}
_REBUILD = "torch._utils _rebuild_tensor_v2"
_ORDERED = "collections OrderedDict"
_MARK = object()
_CONSTANTS = {
    "NONE": None,
    "NEWTRUE": True,
    "NEWFALSE": False,
    "EMPTY_TUPLE": (),
}
_LITERALS = frozenset(
    ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "BINUNICODE", "SHORT_BINSTRING")
)
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


def read_torch_zip(path: Path) -> Any:
    """Return the object that `torch.save` wrote to a file, with NumPy arrays for tensors; runs no code of it.

    Raises TraceError if the file is no such archive, or has more than plain data and tensors.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _Machine(archive).run()
    except _RefusedError as error:
        raise TraceError(
            f"{path} holds {error}: only tensors and plain data are read, since a pickle can run code"
        ) from error
    # A broken pickle raises these errors on the stack machine, and zipfile does for a broken archive.
    except (ValueError, TypeError, LookupError, OSError, EOFError, zipfile.BadZipFile) as error:
        raise TraceError(
            f"{path} is no whole file of torch.save ({error}): dump it again"
        ) from error


class _RefusedError(Exception):
    """The pickle has an opcode or a name that is not for plain data."""


class _Machine:
    """Stack machine that follows the opcodes of one pickle, for plain data only."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        (self._root,) = (
            name.removesuffix("data.pkl")
            for name in archive.namelist()
            if name.count("/") == 1 and name.endswith("/data.pkl")
        )
        byteorder = f"{self._root}byteorder"
        if byteorder in archive.namelist() and archive.read(byteorder) != b"little":
            raise _RefusedError("numbers in big-endian order")
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._storages: dict[str, np.ndarray[Any, Any]] = {}

    def run(self) -> Any:
        for opcode, argument, _ in pickletools.genops(self._archive.read(f"{self._root}data.pkl")):
            if opcode.name == "STOP":
                return self._stack.pop()
            self._follow(opcode.name, argument)
        raise ValueError("the pickle does not stop")

    def _follow(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name in _LITERALS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name in _TUPLES:
            count = _TUPLES[name]
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "MARK":
            stack.append(_MARK)
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "TUPLE":
            stack.append(tuple(self._to_mark()))
        elif name == "APPEND":
            value = stack.pop()
            stack[-1].append(value)
        elif name == "APPENDS":
            values = self._to_mark()
            stack[-1].extend(values)
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            stack[-1][key] = value
        elif name == "SETITEMS":
            values = self._to_mark()
            stack[-1].update(zip(values[::2], values[1::2], strict=True))
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name == "GLOBAL":
            stack.append(_name(argument))
        elif name == "BINPERSID":
            stack.append(self._storage(stack.pop()))
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append(_call(function, arguments))
        elif name != "PROTO":
            raise _RefusedError(f"the pickle opcode {name}")

    def _to_mark(self) -> list[Any]:
        """Pop the last mark and the values above it; return the values, the items of a pickled container."""
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
        values = self._stack[at + 1 :]
        del self._stack[at:]
        return values

    def _storage(self, reference: Any) -> np.ndarray[Any, Any]:
        """Read a storage's bytes from the archive, as an array of its type."""
        kind, storage, key, _device, _numbers = reference
        if kind != "storage" or not isinstance(storage, _Name):
            raise _RefusedError(f"a reference to {kind!r}")
        dtype = _STORAGES[storage]
        if key not in self._storages:
            entry = self._archive.getinfo(f"{self._root}data/{key}")
            if entry.compress_type != zipfile.ZIP_STORED:
                raise _RefusedError("a compressed storage")
            self._storages[key] = np.frombuffer(self._archive.read(entry), dtype)
        return self._storages[key]


class _Name(str):
    """The name of a class or function in a pickle; not callable."""


def _name(argument: str) -> _Name:
    if argument not in (_REBUILD, _ORDERED) and argument not in _STORAGES:
        raise _RefusedError(argument.replace(" ", "."))
    return _Name(argument)


def _call(function: Any, arguments: Any) -> Any:
    if function == _ORDERED and arguments == ():
        return {}
    if function != _REBUILD:
        raise _RefusedError(f"a call of {str(function).replace(' ', '.')}")
    storage, offset, size, stride = arguments[:4]
    # NumPy checks that the view lies inside the buffer.
    return np.ndarray(
        size,
        storage.dtype,
        storage,
        offset * storage.itemsize,
        [step * storage.itemsize for step in stride],
    )
