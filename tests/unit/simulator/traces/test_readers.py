"""Traces survive writing and reading, from all formats; one clear error for each mistake."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from eaas.errors import TraceError
from simulator.traces import Trace, read_trace, write_trace
from simulator.traces.arrays import Meaning
from simulator.traces.trace import checked_counts

LAYERS, TOP_K, EXPERTS = 3, 2, 8
SUFFIXES = [".npy", ".npz", ".safetensors", ".pt"]
COUNTS = np.arange(24, dtype=np.int64).reshape(4, 2, 3) * 20


def some_ids(tokens: int, layers: int = LAYERS, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((tokens, layers, EXPERTS)), axis=2)[..., :TOP_K]


def trace(counts: Any = COUNTS, **notes: Any) -> Trace:
    return Trace(checked_counts(np.asarray(counts), "test"), notes)


def save(path: Path, values: Any) -> Path:
    """Write an array, or arrays by name, in the format of the suffix."""
    named = values if isinstance(values, dict) else {"routed_experts": values}
    if path.suffix == ".npy":
        np.save(path, values)
    elif path.suffix == ".npz":
        np.savez(path, **named)
    elif path.suffix == ".safetensors":
        save_file({name: np.ascontiguousarray(array) for name, array in named.items()}, path)
    else:
        tensors = {n: torch.from_numpy(np.ascontiguousarray(a)) for n, a in named.items()}
        torch.save(tensors if values is named else tensors["routed_experts"], path)
    return path


def refusal(path: Path, meaning: Meaning) -> str:
    """The error of reading a file: one line that names it."""
    with pytest.raises(TraceError) as caught:
        read_trace(path, meaning)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- what we write ----------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def test_nothing_is_left_where_writing_fails(tmp_path: Path) -> None:
    (tmp_path / "d.npz").mkdir()
    for wrong in ("x.txt", "nowhere/x.npz", "d.npz"):
        with pytest.raises(TraceError):
            write_trace(trace(), tmp_path / wrong)
    with pytest.raises(TypeError):
        write_trace(trace(bad=object()), tmp_path / "x.npz")
    assert [file.name for file in tmp_path.iterdir()] == ["d.npz"]


# -- plain arrays: ids or counts as the user says ------------------------------------------------------


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("suffix", SUFFIXES)
@given(
    total=st.integers(1, 60),
    per=st.integers(1, 70),
    dtype=st.sampled_from([np.uint8, np.int16, np.int32, np.int64, np.float32]),
    seed=st.integers(0, 99),
)
def test_ids_are_counted_by_iteration(tmp_path, suffix, total, per, dtype, seed) -> None:
    ids_TLK = some_ids(total, seed=seed)
    path = save(tmp_path / f"x{suffix}", ids_TLK.astype(dtype))
    read = read_trace(path, Meaning("ids", EXPERTS, per))
    assert read.counts_ILE.shape == (-(-total // per), LAYERS, EXPERTS)
    for iteration, counts_LE in enumerate(read.counts_ILE):
        part_TLK = ids_TLK[iteration * per : (iteration + 1) * per]
        for layer in range(LAYERS):
            expected = np.bincount(part_TLK[:, layer].ravel(), minlength=EXPERTS)
            assert np.array_equal(counts_LE[layer], expected)
    assert read.notes["tokens"] == per
    assert read.notes["source"] == path.name


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_counts_of_few_experts_are_believed_and_those_of_many_are_known(tmp_path, suffix) -> None:
    few = np.arange(60).reshape(5, 3, 4)
    path = save(tmp_path / f"few{suffix}", few)
    for meaning in (Meaning("counts"), Meaning("counts", experts=4)):
        assert np.array_equal(read_trace(path, meaning).counts_ILE, few)
    assert "--kind counts or --kind ids" in refusal(path, Meaning())
    # No router chooses 33 experts for a token, and no layer has an expert 1024.
    for certain in (np.ones((5, 3, 33), np.int64), few + 1024 - 59):
        path = save(tmp_path / f"certain{suffix}", certain)
        assert np.array_equal(read_trace(path).counts_ILE, certain)


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize(
    ("values", "meaning", "named"),
    [
        (some_ids(2079, 32), Meaning(), "the shape (2079, 32, 2) can be counts, 2079 iterations"),
        (some_ids(2079, 32), Meaning(experts=8), "--kind counts or --kind ids"),
        (some_ids(9).astype(float), Meaning(), "or ids, 9 tokens x 3 layers x top-2"),
        (some_ids(9), Meaning("ids"), "give --experts"),
        (some_ids(9), Meaning("ids", 1), "2 experts for each token: give --experts"),
        (some_ids(9), Meaning("ids", 1 << 20), "at most 65536"),
        (some_ids(9) + 1, Meaning("ids", 8), "has the id 8, and 8 experts are 0 to 7"),
        (some_ids(9) - 1, Meaning("ids", 8), "has the id -1, and 8 experts are 0 to 7: leave pad"),
        (np.zeros((9, 3, 2), int), Meaning("ids", 8), "token 0, layer 0 has the expert 0 twice"),
        (np.full((9, 3, 2), np.nan), Meaning("ids", 8), "layer 0, choice 0 is nan, no id of an"),
        (np.full((9, 3, 2), 1e308), Meaning("ids", 8), "layer 0, choice 0 is 1e+308, no id of an"),
        (np.full((9, 3, 2), -np.inf), Meaning("ids", 8), "layer 0, choice 0 is -inf, no id of an"),
        (some_ids(9) + 0.5, Meaning("ids", 8), "no id of an expert: give whole numbers"),
        (np.full((9, 3, 40), np.nan), Meaning(), "expert 0 is nan, no whole number"),
        (np.full((1, 2, 2), np.inf), Meaning("counts"), "layer 0, expert 0 is inf"),
        (np.array([[[1, 2], [3, -4]]]), Meaning("counts"), "iteration 0, layer 1, expert 1 is -4"),
        (np.array([[[0.5]]]), Meaning("counts"), "no whole number"),
        (np.array([[[2**32]]]), Meaning("counts"), "4 bytes"),
        (np.zeros((0, 3, 2), int), Meaning("ids", 8), "has the shape (0, 3, 2), give"),
        (np.zeros((9, 3), int), Meaning("ids", 8), "has the shape (9, 3), give"),
        (np.zeros((2, 3)), Meaning("counts"), "has the shape (2, 3), give"),
        (np.zeros((9, 3, 2), bool), Meaning("ids", 8), "holds bool, give whole numbers"),
        (some_ids(9), Meaning("counts", 8), "counts of 2 experts, not of 8: give --experts 2, or"),
        (some_ids(9), Meaning("counts", tokens=5), "leave --tokens out"),
        (some_ids(9), Meaning("ids", 8, name="b"), "no array 'b'"),
    ],
)
def test_one_clear_error_for_each_mistake(tmp_path, suffix, values, meaning, named) -> None:
    # safetensors' names of types are its own.
    named = named.replace("bool", "BOOL" if suffix == ".safetensors" else "bool")
    assert named in refusal(save(tmp_path / f"x{suffix}", values), meaning)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pt"])
def test_one_of_several_arrays_is_chosen_by_name(tmp_path: Path, suffix: str) -> None:
    arrays = {"prompt": some_ids(5), "answer": some_ids(6, seed=1), "scores": np.zeros(3)}
    path = save(tmp_path / f"x{suffix}", arrays)
    for name in (None, "x"):
        said = refusal(path, Meaning("ids", 8, name=name))
        assert all(part in said for part in ("'prompt'", "'answer'", "--array"))
    read = read_trace(path, Meaning("ids", 8, 100, "answer"))
    assert read.counts_ILE.sum() == 6 * LAYERS * TOP_K
    assert read.notes["array"] == "answer"
    assert "array scores: has the shape" in refusal(path, Meaning("ids", 8, name="scores"))


@pytest.mark.parametrize(
    ("meaning", "named"),
    [
        (Meaning("ids", 2), "leave --kind ids out"),
        (Meaning(tokens=4), "leave --tokens and --array out"),
        (Meaning("counts", name="counts"), "leave --tokens and --array out"),
        (Meaning(experts=7), "counts of 3 experts, not of 7"),
    ],
)
@pytest.mark.parametrize("suffix", [".npz", ".csv"])
def test_a_trace_that_says_what_it_is_is_believed(tmp_path, suffix, meaning, named) -> None:
    path = tmp_path / f"x{suffix}"
    write_trace(trace(), path)
    for fine in (Meaning(), Meaning("counts"), Meaning("counts", 3), Meaning(experts=3)):
        assert np.array_equal(read_trace(path, fine).counts_ILE, COUNTS)
    assert named in refusal(path, meaning)


# -- CSV --------------------------------------------------------------------------------------------


def test_long_csv(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("iteration,layer,expert,count\n0,0,2,5\n0,1,0,1\n1,1,1,3\n1,0,0,0\n")
    expected = [[[0, 0, 5], [1, 0, 0]], [[0, 0, 0], [0, 3, 0]]]
    assert read_trace(path).counts_ILE.tolist() == expected
    path.write_bytes(b"\xef\xbb\xbfiteration,layer,0,1\r\n0,0,5,6\r\n\r\n")
    assert read_trace(path).counts_ILE.tolist() == [[[5, 6]]]


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("a,b,c\n1,2,3\n", "header"),
        ("iteration,layer,0,1\n", "rows"),
        ("iteration,layer,0\n\n", "a header and no rows"),
        ("iteration,layer,0,1\n0,0,1,2\n2,0,1,2\n", "missing"),
        ("iteration,layer,0,1\n0,0,1,2\n0,1,1,2\n1,0,1,2\n1,0,1,2\n", "iteration 1, layer 0"),
        ("iteration,layer,0,1\n0,0,1,\n", "none left out"),
        ("iteration,layer,0,1\n0,0,1\n", "3"),
        ("iteration,layer,0,1\n0,0,1.5,2\n", "whole numbers"),
        ("iteration,layer,0,1\n0,0,-1,2\n", "iteration 0, layer 0, expert 0 is -1"),
        ("iteration,layer,0,1\n-1,0,1,2\n", "-1"),
        ("iteration,layer,0,1\n99999999999,0,1,2\n", "missing"),
        (f"iteration,layer,0\n{2**63 - 1},0,1\n", "1 rows for 9223372036854775808 iterations"),
        (
            "iteration,layer,expert,count\n0,0,0,1\n0,1,0,1\n1,0,0,1\n1,0,1,4\n",
            "iteration 1, layer 1",
        ),
        ("iteration,layer,expert,count\n0,0,1,1\n0,0,1,2\n", "expert 1 is there twice"),
        ("iteration,layer,expert,count\n0,0,1000000000000,1\n", "expert 1000000000000: "),
        (f"iteration,layer,expert,count\n0,0,{2**63 - 1},1\n", "expert 9223372036854775807: num"),
    ],
)
@pytest.mark.filterwarnings("ignore:loadtxt. input contained no data")
def test_wrong_csv(tmp_path: Path, text: str, named: str) -> None:
    path = tmp_path / "x.csv"
    path.write_text(text)
    assert named in refusal(path, Meaning())


# -- files that no writer makes --------------------------------------------------------------------------


DEEP = np.frombuffer(b"[" * 100_000, np.uint8)
SHORT = torch.zeros(4, 3, 40, dtype=torch.bfloat16)


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


def archive(path: Path) -> None:
    own(path.with_suffix(".npz"))
    path.with_suffix(".npz").rename(path)


def pickled(path: Path) -> None:
    save(path, np.array([[[object()]]]))


@pytest.mark.parametrize(
    ("name", "write", "named"),
    [
        ("x.npz", lambda path: own(path, version=2), "version 2"),
        ("x.npz", lambda path: own(path, version=np.inf), "malformed"),
        ("x.npz", lambda path: own(path, notes=DEEP), "malformed (RecursionError"),
        ("x.npz", lambda path: own(path, counts=COUNTS + 2.0**63), "4 bytes"),
        ("x.npz", lambda path: own(path, counts=COUNTS * 1e305), "4 bytes"),
        ("x.npz", lambda path: with_members(path, header("(99999999999, 9999, 9)")), "malformed ("),
        ("x.npy", lambda path: path.write_bytes(header("(-1, 2, 64)")), "malformed (OverflowError"),
        ("x.npy", lambda path: path.write_bytes(header("((((((1, 2")), "malformed ("),
        ("x.npy", lambda path: save(path, np.array([[["1"]]])), "<U1"),
        ("x.npy", archive, "malformed (ValueError"),
        ("x.npy", pickled, "malformed (ValueError"),
        ("x.npz", pickled, "malformed (ValueError"),
        ("x.safetensors", lambda path: save_torch({"a": SHORT}, path), "array a: holds BF16"),
    ],
)
def test_what_no_writer_makes(tmp_path, name, write, named) -> None:
    path = tmp_path / name
    write(path)
    assert named in refusal(path, Meaning("counts"))


@pytest.mark.parametrize("name", ["x.txt", "x.npz", "x.npy", "x.pt", "x.csv", "x.safetensors"])
def test_files_that_are_no_trace(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    assert "does not exist" in refusal(path, Meaning())
    path.write_bytes(b"\x80nothing of the kind")
    refusal(path, Meaning())


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pt"])
@pytest.mark.parametrize("cut", [0, 5, 60, 300, -40])
def test_a_cut_off_file(tmp_path: Path, suffix: str, cut: int) -> None:
    path = save(tmp_path / f"x{suffix}", some_ids(500))
    path.write_bytes(path.read_bytes()[:cut])
    refusal(path, Meaning("ids", 8))
