"""Reads routing traces of all formats: one reader for each suffix.

A reader takes a path and returns a `Trace`, if the file says what it holds; or its plain arrays by name.
"""

from __future__ import annotations

import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from tokenize import TokenError

from eaas.errors import TraceError
from eaas.log import one_line
from simulator.traces.arrays import Arrays, Meaning, read_npy, read_safetensors, trace_of
from simulator.traces.csv_file import read_csv
from simulator.traces.file import read_npz
from simulator.traces.sglang import read_sglang
from simulator.traces.trace import Trace

__all__ = ["read_trace"]


_READERS: dict[str, Callable[[Path], Trace | Arrays]] = {
    ".npz": read_npz,
    ".npy": read_npy,
    ".safetensors": read_safetensors,
    ".csv": read_csv,
    ".pt": read_sglang,
}
_NOTHING_SAID = Meaning()
# What NumPy, json, zipfile, zlib and our readers raise for contents that no writer makes.
_MALFORMED = (
    ArithmeticError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    OSError,
    RuntimeError,
    SyntaxError,
    TokenError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
    zlib.error,
)


def read_trace(path: str | os.PathLike[str], meaning: Meaning = _NOTHING_SAID) -> Trace:
    """Read a routing trace; the suffix selects the format.

    Args:
        path: A trace that says what it is: our own .npz, .csv, or SGLang's .pt. Or a plain array: .npy, other
            programs' .npz, .safetensors, or .pt.
        meaning: What a plain array holds.

    Raises:
        TraceError: The file is missing, of another format, or has holes, negatives or a wrong shape; the
            message names the place. Or a plain array may be ids or counts, and `meaning` does not say which;
            or `meaning` contradicts the file.
    """
    source = Path(path)
    if not source.is_file():
        what = "is a directory" if source.is_dir() else "does not exist"
        raise TraceError(f"{source} {what}: give the file of a trace")
    if source.suffix not in _READERS:
        raise TraceError(f"{source}: only {', '.join(_READERS)} are read: convert it first")
    try:
        found = _READERS[source.suffix](source)
        if not isinstance(found, Trace):
            return trace_of(found, source, meaning)
        _check_said(meaning, found, source)
        return found
    except _MALFORMED as error:
        what = f"{type(error).__name__}: {one_line(error)}"
        raise TraceError(f"{source} is malformed ({what}): write it again") from error


def _check_said(meaning: Meaning, found: Trace, source: Path) -> None:
    """Raise TraceError if what is said about a trace that says itself what it is contradicts it."""
    what = f"{source} says itself that it holds counts of {found.experts} experts"
    if meaning.kind == "ids":
        raise TraceError(f"{what}: leave --kind ids out")
    if meaning.tokens is not None or meaning.name is not None:
        raise TraceError(f"{what}: leave --tokens and --array out")
    if meaning.experts not in (None, found.experts):
        raise TraceError(f"{what}, not of {meaning.experts}: leave --experts out")
