"""SGLang's dumps, made with torch.save as SGLang makes them, are read without torch and run no code."""

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eaas.errors import TraceError
from simulator.traces import read_trace
from simulator.traces.torch_zip import read_torch_zip

COUNT = torch.arange(24, dtype=torch.int32).reshape(4, 2, 3)


def dump(path: Path, content: Any) -> Path:
    torch.save(content, path)
    return path


def records(count_LP: torch.Tensor, map_LP: torch.Tensor, key: Any = 0) -> dict[str, Any]:
    record = {"forward_pass_id": key, "global_physical_count": count_LP}
    return {"records": [record], "last_physical_to_logical_map": map_LP}


def test_per_pass(tmp_path: Path) -> None:
    # Physical expert 3 is a replica of logical expert 1 in layer 0, of 2 in layer 1.
    physical_to_logical = torch.tensor([[0, 1, 2, 1], [0, 1, 2, 2]])
    records = [
        {
            "forward_pass_id": number,
            "rank": 0,
            "gatherer_key": "primary",
            "input_ids": [1, 2, 70000],
            "extend_seq_lens": None,
            "topk_ids_of_layer": torch.zeros(2, 3, 8, dtype=torch.int32),
            "global_physical_count": torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]) * scale,
        }
        for number, scale in ((8, 10), (7, 1), (7, 1))
    ]
    content = {"records": records, "last_physical_to_logical_map": physical_to_logical}
    read = read_trace(dump(tmp_path / "x.pt", content))
    assert read.counts_ILE.tolist() == [
        [[2, 12, 6], [10, 12, 30]],
        [[10, 60, 30], [50, 60, 150]],
    ]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ([1], "list"),
        ({}, "nothing"),
        ({"weights": 1}, "weights"),
        ({"logical_count": torch.zeros(4, 2, 3)}, "logical_count"),
        ({"logical_count": COUNT[0]}, "logical_count"),
        ({"logical_count": torch.zeros(4, 2, 3, dtype=torch.int32)}, "no token"),
        ({"logical_count": -COUNT}, "negative"),
        ({"records": []}, "last_physical_to_logical_map"),
        ({"records": [], "last_physical_to_logical_map": torch.zeros(2, 3).long()}, "no token"),
        ({"records": [3], "last_physical_to_logical_map": COUNT[0]}, "forward_pass_id"),
        (
            {
                "records": [{"forward_pass_id": 0, "global_physical_count": COUNT[0, :1]}],
                "last_physical_to_logical_map": COUNT[0],
            },
            "(1, 3)",
        ),
        (records(COUNT[0], torch.full((2, 3), 2**62)), "to expert 4611686018427387904"),
        # Four of them are 2**64, which int64 takes for 0.
        (records(torch.full((2, 4), 2**62), torch.zeros(2, 4).long()), "more than 4 bytes hold"),
        (records(COUNT[0], COUNT[0] * 0, key=[1]), "malformed"),
        ({"records": 5, "last_physical_to_logical_map": COUNT[0]}, "malformed"),
        ({"records": [], "last_physical_to_logical_map": torch.zeros(0, 0).long()}, "malformed"),
    ],
)
def test_other_dumps(tmp_path: Path, content: Any, named: str) -> None:
    with pytest.raises(TraceError) as caught:
        read_trace(dump(tmp_path / "x.pt", content))
    assert named in str(caught.value)


def test_every_kind_of_plain_data(tmp_path: Path) -> None:
    content = {
        "numbers": [0, 255, 65536, -1, 2**40, 1.5, True, False, None],
        "tuples": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
        "nested": {1: {"a": [[]]}},
        "again": [COUNT, COUNT],
    }
    read = read_torch_zip(dump(tmp_path / "x.pt", content))
    assert read["numbers"] == content["numbers"]
    assert read["tuples"] == content["tuples"]
    assert read["nested"] == content["nested"]
    assert all(np.array_equal(array, COUNT.numpy()) for array in read["again"])


def test_views_and_types(tmp_path: Path) -> None:
    types = (torch.int64, torch.int16, torch.int8, torch.uint8, torch.bool, torch.float16)
    content = [COUNT[1:, :, ::2], COUNT.transpose(0, 2), torch.tensor(3.5), torch.zeros(0, 2)]
    content += [COUNT.to(kind) for kind in types]
    for read, tensor in zip(read_torch_zip(dump(tmp_path / "x.pt", content)), content, strict=True):
        assert read.dtype == tensor.numpy().dtype
        assert np.array_equal(read, tensor.numpy())


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("ran"),))


@pytest.mark.parametrize("content", [Evil(), [COUNT, {"x": Evil()}], torch.float32, {1, 2}, b"x"])
def test_nothing_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any) -> None:
    path = dump(tmp_path / "x.pt", content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TraceError, match="plain data"):
        read_torch_zip(path)
    assert [file.name for file in tmp_path.iterdir()] == ["x.pt"]


def with_pickle(path: Path, pickle: bytes, **storages: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", pickle)
        for key, content in storages.items():
            archive.writestr(f"x/data/{key}", content)
    return path


def rebuilt(size: bytes, stride: bytes, offset: bytes) -> bytes:
    """A pickle of one tensor over the storage "s" of 4 numbers."""
    reference = b"(X\x07\x00\x00\x00storagectorch\nIntStorage\nX\x01\x00\x00\x00sX\x03\x00\x00\x00cpuK\x04tQ"
    rest = b"K" + offset + b"K" + size + b"\x85K" + stride + b"\x85"
    return b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n(" + reference + rest + b"tR."


def test_a_tensor_stays_inside_its_storage(tmp_path: Path) -> None:
    storage = np.arange(4, dtype="<i4").tobytes()
    good = with_pickle(tmp_path / "good.pt", rebuilt(b"\x02", b"\x02", b"\x01"), s=storage)
    assert read_torch_zip(good).tolist() == [1, 3]
    for size, stride, offset in ((b"\x05", b"\x01", b"\x00"), (b"\x02", b"\x02", b"\x02")):
        bad = with_pickle(tmp_path / "bad.pt", rebuilt(size, stride, offset), s=storage)
        with pytest.raises(TraceError, match="no whole file"):
            read_torch_zip(bad)


@pytest.mark.parametrize("rest", [None, b"", b".", b"t.", b"R.", b"h\x05.", b"}a."])
def test_broken_pickles(tmp_path: Path, rest: bytes | None) -> None:
    pickle = b"" if rest is None else b"\x80\x02" + rest
    with pytest.raises(TraceError, match="no whole file"):
        read_torch_zip(with_pickle(tmp_path / "x.pt", pickle))
