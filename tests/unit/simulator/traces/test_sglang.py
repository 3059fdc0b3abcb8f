"""SGLang's dumps, made with torch.save as SGLang makes them, are read and run no code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eaas.errors import TraceError
from simulator.traces import read_trace

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


def test_views_and_types(tmp_path: Path) -> None:
    view = COUNT.transpose(0, 2)
    for kind in (torch.int64, torch.int16, torch.uint8):
        content = {"logical_count": view.to(kind), "nested": [(1, {"a": None})]}
        read = read_trace(dump(tmp_path / "x.pt", content))
        assert np.array_equal(read.counts_ILE, view.numpy())


class Evil:
    def __reduce__(self) -> Any:
        return (Path.touch, (Path("ran"),))


@pytest.mark.parametrize("content", [Evil(), [COUNT, {"x": Evil()}]])
def test_nothing_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any) -> None:
    path = dump(tmp_path / "x.pt", content)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TraceError, match="plain data"):
        read_trace(path)
    assert [file.name for file in tmp_path.iterdir()] == ["x.pt"]
