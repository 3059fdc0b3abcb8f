"""Shards are read on demand and without memory mapping."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eaas.checkpoint.header import ShardHeader, read_header
from eaas.checkpoint.local import LocalSource
from eaas.checkpoint.shard import LocalShard, Shard
from eaas.errors import CorruptShardError, UnsupportedModelError

DTYPES = [
    torch.bool,
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint16, torch.uint32, torch.uint64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    tensors = {str(d): torch.arange(24).view(4, 3, 2).to(d) for d in DTYPES}
    tensors |= {"scalar": torch.tensor(7.5), "empty": torch.empty(0, 5), "bias": torch.ones(4)}
    path = tmp_path / "a.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def opened(path: Path) -> Shard:
    return LocalShard(path, header_of(path))


def header_of(path: Path) -> ShardHeader:
    return read_header(LocalSource(path.parent), path.name)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_rows_and_one_row(file: Path, dtype: torch.dtype) -> None:
    expected = torch.arange(24).view(4, 3, 2).to(dtype)
    tensor = opened(file).slice(str(dtype))
    assert (tensor.get_shape(), tensor.dtype) == ([4, 3, 2], dtype)
    for part, wanted in [
        (tensor[...], expected),
        (tensor[:], expected),
        (tensor[1:3], expected[1:3]),
        (tensor[3:1], expected[3:1]),
        (tensor.row(2)[...], expected[2]),
        (tensor.row(2).row(1)[:1], expected[2, 1, :1]),
    ]:
        assert (part.shape, part.dtype) == (wanted.shape, dtype)
        assert raw(part) == raw(wanted)


def test_scalars_and_tensors_without_elements(file: Path) -> None:
    shard = opened(file)
    assert shard.slice("scalar")[...].item() == 7.5
    assert shard.slice("bias").row(3)[...].item() == 1
    assert shard.slice("empty")[...].shape == (0, 5)
    assert shard.slice("empty")[:].shape == (0, 5)


def test_a_file_larger_than_memory(tmp_path: Path) -> None:
    """A mapping would be charged in full without overcommit."""
    rows, row_bytes = 1 << 20, 1 << 20
    size = rows * row_bytes
    fields = {"dtype": "U8", "shape": [rows, row_bytes], "data_offsets": [0, size]}
    header = json.dumps({"all": fields}).encode()
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        file.truncate(8 + len(header) + size)  # a hole: it takes no room
        file.seek(8 + len(header) + 700_000 * row_bytes)
        file.write(b"here")
    row = opened(path).slice("all").row(700_000)[...]
    assert row[:5].tolist() == [*b"here", 0]
    assert str(path) not in Path("/proc/self/maps").read_text()


def test_the_file_is_closed_with_the_last_slice(file: Path) -> None:
    def is_open() -> bool:
        return any(entry.resolve() == file for entry in Path("/proc/self/fd").iterdir())

    shard = opened(file)
    tensor = shard.slice("bias")
    del shard
    assert is_open()
    assert tensor[...].sum() == 4
    del tensor
    assert not is_open()


def test_a_file_that_shrinks_under_a_slice(file: Path) -> None:
    tensor = opened(file).slice(str(torch.float64))
    os.truncate(file, os.path.getsize(file) // 2)
    with pytest.raises(CorruptShardError, match=rf"{file.name}: tensor torch\.float64 .* ends at"):
        tensor[...]


@pytest.mark.parametrize("cut", [0, 7, 100, -1])
def test_a_shortened_file(file: Path, cut: int) -> None:
    header = header_of(file)
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"ends at byte|has changed"):
        LocalShard(file, header)


def test_another_file_of_the_same_size(file: Path) -> None:
    header = header_of(file)
    file.write_bytes(file.read_bytes().replace(b'"bias"', b'"sail"'))
    with pytest.raises(ValueError, match="has changed"):
        LocalShard(file, header)


def test_a_dtype_that_torch_lacks(tmp_path: Path) -> None:
    fields = {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}
    header = json.dumps({"small": fields}).encode()
    path = tmp_path / "six.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"abc")
    with pytest.raises(UnsupportedModelError, match=r"six\.safetensors: tensor small is F6_E2M3"):
        opened(path).slice("small")[...]
