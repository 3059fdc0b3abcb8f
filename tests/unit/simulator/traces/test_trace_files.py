"""Traces survive writing and reading; errors name the wrong place."""

from __future__ import annotations

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from eaas.errors import TraceError
from simulator.traces import Trace, read_trace, write_trace
from simulator.traces.arrays import Meaning
from simulator.traces.trace import checked_counts

COUNTS = np.arange(24, dtype=np.int64).reshape(4, 2, 3) * 20


def trace(counts: Any = COUNTS, **notes: Any) -> Trace:
    return Trace(checked_counts(np.asarray(counts), "test"), notes)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    hnp.arrays(
        np.int64,
        hnp.array_shapes(min_dims=3, max_dims=3, max_side=4),
        elements=st.integers(0, 2**32 - 1),
    )
)
@pytest.mark.parametrize("suffix", [".npz", ".npy", ".csv"])
def test_a_written_trace_is_read(tmp_path: Path, suffix: str, counts: Any) -> None:
    path = tmp_path / f"x{suffix}"
    write_trace(trace(counts), path)
    read = read_trace(path, Meaning("counts")).counts_ILE
    assert read.dtype == np.min_scalar_type(int(counts.max()))
    assert np.array_equal(read, counts)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_notes_are_kept_and_repeats_are_packed(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    write_trace(trace(np.full((500, 4, 16), 7), model="ünïcode", top_k=8), path)
    assert read_trace(path).notes == {"model": "ünïcode", "top_k": 8}
    assert path.stat().st_size < 500 * 4 * 16 / 10


def test_long_csv(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("iteration,layer,expert,count\n0,0,2,5\n0,1,0,1\n1,1,1,3\n1,0,0,0\n")
    expected = [[[0, 0, 5], [1, 0, 0]], [[0, 0, 0], [0, 3, 0]]]
    assert read_trace(path).counts_ILE.tolist() == expected


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a,b,c\n1,2,3\n", "header"),
        ("iteration,layer,0,1\n", "rows"),
        ("iteration,layer,0,1\n0,0,1,2\n2,0,1,2\n", "missing"),
        ("iteration,layer,0,1\n0,0,1,2\n0,1,1,2\n1,0,1,2\n1,0,1,2\n", "iteration 1, layer 0"),
        ("iteration,layer,0,1\n0,0,1,\n", "none left out"),
        ("iteration,layer,0,1\n0,0,1\n", "3"),
        ("iteration,layer,0,1\n0,0,1.5,2\n", "whole numbers"),
        ("iteration,layer,0,1\n0,0,-1,2\n", "iteration 0, layer 0, expert 0 is -1"),
        ("iteration,layer,0,1\n-1,0,1,2\n", "-1"),
        ("iteration,layer,0,1\n99999999999,0,1,2\n", "missing"),
        (
            "iteration,layer,expert,count\n0,0,0,1\n0,1,0,1\n1,0,0,1\n1,0,1,4\n",
            "iteration 1, layer 1",
        ),
        ("iteration,layer,expert,count\n0,0,1,1\n0,0,1,2\n", "expert 1 is there twice"),
        ("iteration,layer,expert,count\n0,0,1000000000000,1\n", "expert 1000000000000: "),
    ],
)
@pytest.mark.filterwarnings("ignore:loadtxt. input contained no data")
def test_wrong_csv(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert named in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        (np.zeros((2, 3)), "shape (2, 3)"),
        (np.zeros((2, 0, 3)), "shape (2, 0, 3)"),
        (np.full((1, 2, 2), np.nan), "iteration 0, layer 0, expert 0 is nan"),
        (np.array([[[1, 2], [3, -4]]]), "iteration 0, layer 1, expert 1 is -4"),
        (np.array([[[0.5]]]), "no whole number"),
        (np.full((1, 2, 2), np.inf), "iteration 0, layer 0, expert 0 is inf"),
        (np.array([[[2**32]]]), "4 bytes"),
        (np.array([[["1"]]]), "<U1"),
    ],
)
def test_wrong_arrays(tmp_path: Path, values: Any, named: str) -> None:
    path = tmp_path / "x.npy"
    np.save(path, values)
    with pytest.raises(TraceError) as caught:
        read_trace(path, Meaning("counts"))
    assert named in str(caught.value)


def test_whole_floats_are_counts(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, COUNTS.astype(np.float32))
    assert np.array_equal(read_trace(path, Meaning("counts")).counts_ILE, COUNTS)


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.array([[[object()]]]), allow_pickle=True)
    with pytest.raises(TraceError, match=r"allow_pickle|pickle"):
        read_trace(path)


@pytest.mark.parametrize("name", ["x.txt", "x.npz", "x.npy", "x.pt", "x.csv"])
def test_files_that_are_no_trace(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    with pytest.raises(TraceError, match="does not exist"):
        read_trace(path)
    path.write_bytes(b"\x80nothing of the kind")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("cut", [10, 300, -30])
def test_a_cut_off_trace(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.npz"
    write_trace(trace(np.arange(3000).reshape(10, 10, 30)), path)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(TraceError, match="is no trace"):
        read_trace(path)


def test_a_trace_of_the_future(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, counts=COUNTS, notes=np.frombuffer(b"{}", np.uint8), version=2)
    with pytest.raises(TraceError, match="version 2"):
        read_trace(path)


def test_nothing_is_left_where_writing_fails(tmp_path: Path) -> None:
    for wrong in ("x.txt", "nowhere/x.npz"):
        with pytest.raises(TraceError):
            write_trace(trace(), tmp_path / wrong)
    (tmp_path / "d.npz").mkdir()
    with pytest.raises(TraceError, match="directory"):
        write_trace(trace(), tmp_path / "d.npz")
    with pytest.raises(TypeError):
        write_trace(trace(bad=object()), tmp_path / "x.npz")
    assert [file.name for file in tmp_path.iterdir()] == ["d.npz"]


def own(path: Path, **parts: Any) -> None:
    parts = {"notes": np.frombuffer(b"{}", np.uint8), "version": 1, "counts": COUNTS} | parts
    np.savez(path, **parts)


def header(shape: str) -> bytes:
    """A .npy without data that states a shape."""
    text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': {shape}, }}".encode().ljust(117)
    return b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + text + b"\n"


def with_members(path: Path, member: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("counts", "notes", "version"):
            archive.writestr(f"{name}.npy", member)


@pytest.mark.parametrize(
    ("name", "write", "named"),
    [
        ("x.npz", lambda path: own(path, version=np.inf), "malformed"),
        (
            "x.npz",
            lambda path: own(path, notes=np.frombuffer(b"[" * 100_000, np.uint8)),
            "malformed (RecursionError",
        ),
        ("x.npz", lambda path: own(path, counts=COUNTS + 2.0**63), "4 bytes"),
        ("x.npz", lambda path: own(path, counts=COUNTS * 1e305), "4 bytes"),
        (
            "x.npz",
            lambda path: with_members(path, header("(99999999999, 9999, 999)")),
            "malformed (",
        ),
        ("x.npy", lambda path: path.write_bytes(header("(-1, 2, 64)")), "malformed (OverflowError"),
        ("x.npy", lambda path: path.write_bytes(header("((((((1, 2")), "malformed ("),
        (
            "x.csv",
            lambda path: path.write_text(f"iteration,layer,0\n{2**63 - 1},0,1\n"),
            "1 rows for 9223372036854775808 iterations",
        ),
        (
            "x.csv",
            lambda path: path.write_text(f"iteration,layer,expert,count\n0,0,{2**63 - 1},1\n"),
            "expert 9223372036854775807: numbers above",
        ),
        ("x.csv", lambda path: path.write_text("iteration,layer,0\n\n"), "a header and no rows"),
    ],
)
def test_what_no_writer_makes(
    tmp_path: Path, name: str, write: Callable[[Path], object], named: str
) -> None:
    path = tmp_path / name
    write(path)
    with pytest.raises(TraceError) as caught:
        read_trace(path, Meaning("counts") if name == "x.npy" else Meaning())
    assert named in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_ends_of_lines_of_a_csv(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(b"\xef\xbb\xbfiteration,layer,0,1\r\n0,0,5,6\r\n\r\n")
    assert read_trace(path).counts_ILE.tolist() == [[[5, 6]]]


@pytest.mark.parametrize("value", [1e308, 2.0**63, np.nan, np.inf, -1e308])
def test_ids_of_no_expert(tmp_path: Path, value: float) -> None:
    path = tmp_path / "x.npy"
    ids = np.tile([1.0, 2.0], (6, 2, 1))
    ids[3, 1, 0] = value
    np.save(path, ids)
    with pytest.raises(
        TraceError, match=r"the id of token 3, layer 1, choice 0 is .*, no id of an"
    ):
        read_trace(path, Meaning("ids", experts=4))
