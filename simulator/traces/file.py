"""Writes routing traces to disk: our own .npz, and .npy and .csv for other programs; reads the .npz.

    counts.npy   (I, L, E), unsigned, of the smallest type that holds them
    notes.npy    JSON object in UTF-8, as bytes
    version.npy  1

The .npz is an ordinary NumPy archive (`numpy.load` opens it) with the fastest compression: a full-size trace
takes seconds to write and about half of its size in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from eaas.errors import TraceError
from simulator.traces.arrays import Arrays, read_archive
from simulator.traces.trace import Trace, checked_counts

__all__ = ["SUFFIXES", "check_target", "read_npz", "write_trace"]

VERSION = 1
SUFFIXES = (".npz", ".npy", ".csv")
_MEMBERS = ("counts", "notes", "version")


def check_target(path: Path) -> None:
    """Raise TraceError if no trace can be written to this path. Commands call it before long work."""
    if path.suffix not in SUFFIXES:
        raise TraceError(f"{path}: give a name that ends in {', '.join(SUFFIXES)}")
    if path.is_dir():
        raise TraceError(f"{path} is a directory: give the name of a file")
    if not path.parent.is_dir():
        raise TraceError(f"{path}: there is no directory {path.parent}: make it first")


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace atomically; the suffix selects the format.

    Args:
        path: .npz (with notes), .npy (counts only) or .csv (wide: a row for each iteration and layer).

    Raises:
        TraceError: No trace can be written to this path.
    """
    target = Path(path)
    check_target(target)
    writer = {".npz": _write_npz, ".npy": _write_npy, ".csv": _write_csv}[target.suffix]
    with _replacing(target) as file:
        writer(trace, file)


def read_npz(path: Path) -> Trace | Arrays:
    """Read a trace in our own format, or return the arrays of another program's archive by name.

    Raises TraceError for another version or wrong counts.
    """
    arrays = read_archive(path)
    if not set(_MEMBERS) <= arrays.keys():
        return arrays
    version, notes = int(arrays["version"]()), json.loads(arrays["notes"]().tobytes())
    if version != VERSION or not isinstance(notes, dict):
        raise TraceError(f"{path} has version {version}, this program reads {VERSION}")
    return Trace(checked_counts(arrays["counts"](), path), notes)


def _write_npz(trace: Trace, file: IO[bytes]) -> None:
    members: dict[str, npt.NDArray[Any]] = {
        "counts": trace.counts_ILE,
        "notes": np.frombuffer(json.dumps(dict(trace.notes)).encode(), np.uint8),
        "version": np.array(VERSION),
    }
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, array in members.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, array, allow_pickle=False)


def _write_npy(trace: Trace, file: IO[bytes]) -> None:
    np.lib.format.write_array(file, trace.counts_ILE, allow_pickle=False)


def _write_csv(trace: Trace, file: IO[bytes]) -> None:
    iterations, layers, experts = trace.counts_ILE.shape
    place = np.indices((iterations, layers)).reshape(2, -1).T
    rows = np.hstack([place, trace.counts_ILE.reshape(-1, experts).astype(np.int64)])
    header = ",".join(["iteration", "layer", *map(str, range(experts))])
    np.savetxt(file, rows, fmt="%d", delimiter=",", header=header, comments="")


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[IO[bytes]]:
    """Open a partial file to write, which replaces the target at the end or is removed after an error."""
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        try:
            with partial.open("xb") as file:
                yield file
            os.replace(partial, target)
        except OSError as error:
            raise TraceError(
                f"{target} cannot be written ({error.strerror or error}): choose another place"
            ) from error
    finally:
        partial.unlink(missing_ok=True)
