"""Plain arrays: ids or counts as the user says, from all formats; one clear error for each mistake."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from eaas.errors import TraceError
from simulator.traces import Trace, read_trace, write_trace
from simulator.traces.arrays import Meaning
from simulator.traces.trace import checked_counts

LAYERS, TOP_K, EXPERTS = 3, 2, 8


def some_ids(tokens: int, layers: int = LAYERS, experts: int = EXPERTS, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((tokens, layers, experts)), axis=2)[..., :TOP_K]


def save(path: Path, values: Any, name: str = "routed_experts") -> Path:
    if path.suffix == ".npy":
        np.save(path, values)
    elif path.suffix == ".npz":
        np.savez(path, **{name: values})
    elif path.suffix == ".safetensors":
        save_file({name: np.ascontiguousarray(values)}, path)
    else:
        torch.save(torch.from_numpy(np.ascontiguousarray(values)), path)
    return path


SUFFIXES = [".npy", ".npz", ".safetensors", ".pt"]


@settings(
    deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@pytest.mark.parametrize("suffix", SUFFIXES)
@given(
    total=st.integers(1, 60),
    per=st.integers(1, 70),
    dtype=st.sampled_from([np.uint8, np.int16, np.int32, np.int64, np.float32]),
    seed=st.integers(0, 99),
)
def test_ids_are_counted_by_iteration(
    tmp_path: Path, suffix: str, total: int, per: int, dtype: Any, seed: int
) -> None:
    ids_TLK = some_ids(total, seed=seed)
    path = save(tmp_path / f"x{suffix}", ids_TLK.astype(dtype))
    read = read_trace(path, Meaning("ids", EXPERTS, per))
    assert read.counts_ILE.shape == (-(-total // per), LAYERS, EXPERTS)
    for iteration, counts_LE in enumerate(read.counts_ILE):
        part_TLK = ids_TLK[iteration * per : (iteration + 1) * per]
        assert (counts_LE.sum(axis=1) == len(part_TLK) * TOP_K).all()
        for layer in range(LAYERS):
            expected = np.bincount(part_TLK[:, layer].ravel(), minlength=EXPERTS)
            assert np.array_equal(counts_LE[layer], expected)
    assert read.notes["tokens"] == per
    assert read.notes["source"] == path.name


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_counts_of_few_experts_are_believed_and_those_of_many_are_known(
    tmp_path: Path, suffix: str
) -> None:
    few = np.arange(60).reshape(5, 3, 4)
    path = save(tmp_path / f"few{suffix}", few)
    assert np.array_equal(read_trace(path, Meaning("counts")).counts_ILE, few)
    assert np.array_equal(read_trace(path, Meaning("counts", experts=4)).counts_ILE, few)
    with pytest.raises(TraceError, match="--kind counts or --kind ids"):
        read_trace(path)
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
        (some_ids(9).astype(np.float64), Meaning(), "or ids, 9 tokens x 3 layers x top-2"),
        (some_ids(9), Meaning("ids"), "give --experts"),
        (some_ids(9), Meaning("ids", 1), "2 experts for each token: give --experts"),
        (some_ids(9), Meaning("ids", 1 << 20), "at most 65536"),
        (some_ids(9) + 1, Meaning("ids", 8), "has the id 8, and 8 experts are 0 to 7"),
        (
            some_ids(9) - 1,
            Meaning("ids", 8),
            "has the id -1, and 8 experts are 0 to 7: leave padded",
        ),
        (
            np.zeros((9, 3, 2), np.int64),
            Meaning("ids", 8),
            "token 0, layer 0 has the expert 0 twice",
        ),
        (
            np.full((9, 3, 2), np.nan),
            Meaning("ids", 8),
            "token 0, layer 0, choice 0 is nan, no id",
        ),
        (some_ids(9) + 0.5, Meaning("ids", 8), "no id of an expert: give whole numbers"),
        (np.full((9, 3, 40), np.nan), Meaning(), "expert 0 is nan, no whole number"),
        (np.zeros((0, 3, 2), np.int64), Meaning("ids", 8), "has the shape (0, 3, 2), give"),
        (np.zeros((9, 3), np.int64), Meaning("ids", 8), "has the shape (9, 3), give"),
        (np.zeros((9, 3, 2), np.bool_), Meaning("ids", 8), "holds bool, give whole numbers"),
        (some_ids(9), Meaning("counts", 8), "counts of 2 experts, not of 8: give --experts 2, or"),
        (some_ids(9), Meaning("counts", tokens=5), "leave --tokens out"),
        (some_ids(9), Meaning("ids", 8, name="b"), "no array 'b'"),
    ],
)
def test_one_clear_error_for_each_mistake(
    tmp_path: Path, suffix: str, values: Any, meaning: Meaning, named: str
) -> None:
    path = save(tmp_path / f"x{suffix}", values)
    with pytest.raises(TraceError) as caught:
        read_trace(path, meaning)
    told = str(caught.value)
    # safetensors' names of types are its own.
    assert named.replace("bool", "BOOL" if suffix == ".safetensors" else "bool") in told
    assert str(path) in told
    assert "\n" not in told


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".pt"])
def test_one_of_several_arrays_is_chosen_by_name(tmp_path: Path, suffix: str) -> None:
    arrays = {"prompt": some_ids(5), "answer": some_ids(6, seed=1), "scores": np.zeros(3)}
    path = tmp_path / f"x{suffix}"
    if suffix == ".npz":
        np.savez(path, **arrays)
    elif suffix == ".safetensors":
        save_file(arrays, path)
    else:
        torch.save({name: torch.from_numpy(a) for name, a in arrays.items()}, path)
    for name in (None, "x"):
        with pytest.raises(TraceError) as caught:
            read_trace(path, Meaning("ids", 8, name=name))
        for part in (str(path), "'prompt'", "'answer'", "--array"):
            assert part in str(caught.value)
    read = read_trace(path, Meaning("ids", 8, 100, "answer"))
    assert read.counts_ILE.sum() == 6 * LAYERS * TOP_K
    assert read.notes["array"] == "answer"
    with pytest.raises(TraceError, match="array scores: has the shape"):
        read_trace(path, Meaning("ids", 8, name="scores"))


def test_many_names_are_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, **{f"request{i}": some_ids(2) for i in range(50)})
    with pytest.raises(TraceError, match=r"'request7', \.\.\. with --array"):
        read_trace(path, Meaning("ids", 8))


@pytest.mark.parametrize(
    ("meaning", "named"),
    [
        (Meaning("ids", 2), "leave --kind ids out"),
        (Meaning(tokens=4), "leave --tokens and --array out"),
        (Meaning("counts", name="counts"), "leave --tokens and --array out"),
        (Meaning(experts=7), "counts of 4 experts, not of 7"),
    ],
)
@pytest.mark.parametrize("suffix", [".npz", ".csv"])
def test_a_trace_that_says_what_it_is_is_believed(
    tmp_path: Path, suffix: str, meaning: Meaning, named: str
) -> None:
    path = tmp_path / f"x{suffix}"
    trace = Trace(checked_counts(np.arange(24).reshape(2, 3, 4), "test"))
    write_trace(trace, path)
    for fine in (Meaning(), Meaning("counts"), Meaning("counts", 4), Meaning(experts=4)):
        assert np.array_equal(read_trace(path, fine).counts_ILE, trace.counts_ILE)
    with pytest.raises(TraceError, match=named):
        read_trace(path, meaning)


def test_a_type_without_numbers_of_ours_is_named(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_torch({"a": torch.zeros(4, 3, 40, dtype=torch.bfloat16)}, path)
    with pytest.raises(TraceError, match="array a: holds BF16"):
        read_trace(path)


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
@pytest.mark.parametrize("cut", [5, 60, -40])
def test_a_cut_off_file(tmp_path: Path, suffix: str, cut: int) -> None:
    path = save(tmp_path / f"x{suffix}", some_ids(500))
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(TraceError) as caught:
        read_trace(path, Meaning("ids", 8))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_pickled_objects_are_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, a=np.array([[[object()]]]))
    with pytest.raises(TraceError, match="pickle"):
        read_trace(path, Meaning("ids", 8))
