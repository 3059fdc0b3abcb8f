"""Validation of a checkpoint's files without torch."""

import errno
import io
import json
import os
import struct
import subprocess
import sys
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eaas.checkpoint import precheck
from eaas.checkpoint.files import read_files
from eaas.errors import (
    CheckpointError,
    CorruptShardError,
    DenseModelError,
    MissingShardError,
    NotACheckpointError,
    UnsupportedModelError,
)

CONFIG = {"model_type": "qwen3_moe"}


def shard_bytes(tensors: dict[str, tuple[str, list[int], int]], data: bytes | None = None) -> bytes:
    """A safetensors file of name -> (dtype, shape, bytes)."""
    header, position = {}, 0
    for name, (dtype, shape, nbytes) in tensors.items():
        offsets = [position, position + nbytes]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        position += nbytes
    return raw_shard(header, bytes(position) if data is None else data)


def raw_shard(header: object, data: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


GOOD = {"a": ("F32", [2, 3], 24), "b": ("BF16", [4], 8), "empty": ("F32", [0, 3], 0)}


def write(path: Path, *, config: object = CONFIG, shard: bytes | None = None) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    (path / "model.safetensors").write_bytes(shard_bytes(GOOD) if shard is None else shard)
    return path


def write_sharded(path: Path, weight_map: dict[str, object] | None = None) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "one.safetensors").write_bytes(shard_bytes({"a": GOOD["a"]}))
    (path / "two.safetensors").write_bytes(shard_bytes({"b": GOOD["b"]}))
    weight_map = weight_map or {"a": "one.safetensors", "b": "two.safetensors"}
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def refused(path: Path, error: type[CheckpointError], *words: str) -> None:
    with pytest.raises(error) as caught:
        precheck(path)
    message = str(caught.value)
    assert "\n" not in message
    for word in (str(path), *words):
        assert word in message


def test_complete_checkpoints_pass_without_torch_or_transformers(tmp_path: Path) -> None:
    precheck(write_sharded(tmp_path / "sharded"))
    code = (
        "import sys; from eaas.checkpoint import precheck; precheck(sys.argv[1]);"
        "sys.exit(bool({'torch', 'transformers', 'safetensors'} & set(sys.modules)))"
    )
    command = [sys.executable, "-c", code, str(write(tmp_path / "x"))]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0


def test_not_a_checkpoint(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", NotACheckpointError, "does not exist", "local directory")
    file = tmp_path / "file"
    file.write_text("x")
    refused(file, NotACheckpointError, f"is a file: give its directory, {tmp_path}")
    refused(tmp_path, NotACheckpointError, "config.json")
    refused(write(tmp_path / "text", config="{"), NotACheckpointError, "config.json", "JSON")
    refused(write(tmp_path / "list", config=[1]), NotACheckpointError, "config.json", "a list")
    refused(write(tmp_path / "none", config={}), NotACheckpointError, "config.json", "model_type")
    no_name = write(tmp_path / "no name", config={"model_type": ""})
    refused(no_name, NotACheckpointError, "config.json", "model_type")
    refused(write(tmp_path / "deep", config="[" * 100_000), NotACheckpointError, "config.json")


def test_other_formats_are_refused(tmp_path: Path) -> None:
    adapter, pickled, gguf = tmp_path / "adapter", tmp_path / "pickled", tmp_path / "gguf"
    for path in (adapter, pickled, gguf):
        path.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    refused(adapter, NotACheckpointError, "merge_and_unload")
    (pickled / "config.json").write_text(json.dumps(CONFIG))
    refused(pickled, NotACheckpointError, "model.safetensors")
    (pickled / "pytorch_model.bin").write_bytes(b"x")
    refused(pickled, NotACheckpointError, "pytorch_model.bin", "refused", "save_pretrained")
    indexed = write_sharded(tmp_path / "indexed", {"a": "one.bin"})
    refused(indexed, NotACheckpointError, "one.bin", "only safetensors")
    file = gguf / "model-Q4.gguf"
    refused(file, NotACheckpointError, "only safetensors", "hf download")
    file.write_bytes(b"GGUF")
    for path in (file, gguf):
        refused(path, NotACheckpointError, "only safetensors", "hf download")
    (gguf / "config.json").write_text(json.dumps(CONFIG))
    refused(gguf, NotACheckpointError, "only safetensors", "hf download")


def test_a_whole_cache_names_its_models(tmp_path: Path) -> None:
    (tmp_path / "models--org--a").mkdir()
    (tmp_path / "datasets--org--b").mkdir()
    with pytest.raises(NotACheckpointError) as caught:
        precheck(tmp_path)
    assert str(caught.value).endswith(f": {tmp_path}/models--org--a")


def hub_cache(path: Path) -> Path:
    """A repository in a cache: its snapshot's files are links."""
    snapshot = path / "models--org--demo" / "snapshots" / "aaa"
    blobs = path / "models--org--demo" / "blobs"
    snapshot.parent.mkdir(parents=True)
    write(snapshot)
    blobs.mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(blobs / str(number))
        file.symlink_to(f"../../blobs/{number}")
    return snapshot


def test_links_of_a_cache_are_followed(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    files = precheck(snapshot.parents[1])
    assert str(files.source) == str(snapshot)
    assert set(files.tensors) == set(GOOD)


def test_links_that_lead_out_of_a_mounted_folder(tmp_path: Path) -> None:
    """As a container sees a snapshot that is mounted alone."""
    mounted = hub_cache(tmp_path / "hub").rename(tmp_path / "mounted")
    refused(mounted, CheckpointError, str(mounted / "config.json"), "models--ORG--NAME", "cp -rL")


def test_a_link_to_a_removed_file(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    (snapshot / "model.safetensors").resolve().unlink()
    refused(snapshot, CheckpointError, "model.safetensors", "hf download org/demo")


DEEP: dict[str, object] = reduce(lambda part, _: {"part": part}, range(480), {})


@pytest.mark.parametrize(
    "config", [{}, {"num_experts": 0}, {"text_config": {"moe": True, "expert_size": 1.0}}, DEEP]
)
def test_a_model_without_experts_is_refused(tmp_path: Path, config: dict[str, object]) -> None:
    path = write(tmp_path / "x", config={"model_type": "llama", **config})
    refused(path, DenseModelError, "config.json", "llama", "another engine")


@pytest.mark.parametrize(
    ("config", "tensor"),
    [
        ({"num_local_experts": 8}, "a"),
        ({"text_config": {"ffn_config": {"moe_num_experts": [1, 4]}}}, "a"),
        ({}, "layers.0.Experts.0.w"),
        ({"model_type": "qwen2_moe"}, "a"),
    ],
)
def test_any_sign_of_experts_is_left_to_transformers(
    tmp_path: Path, config: dict[str, object], tensor: str
) -> None:
    shard = shard_bytes({tensor: GOOD["a"]})
    precheck(write(tmp_path / "x", config={"model_type": "llama", **config}, shard=shard))


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer.model", "vocab.json", "tiktoken.model", "tekken.json"]
)
def test_a_missing_tokenizer(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    for other in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        (tmp_path / other).write_text("{}")
    with pytest.raises(NotACheckpointError, match=r"has no tokenizer\.json: .*hf download"):
        precheck(tmp_path, tokenizer=True)
    vocabulary = {"version": "1.0", "model": {"type": "WordLevel", "vocab": {}, "unk_token": "x"}}
    (tmp_path / name).write_text(json.dumps(vocabulary))
    precheck(tmp_path, tokenizer=True)


@pytest.mark.parametrize("nested", [False, True])
def test_quantised(tmp_path: Path, nested: bool) -> None:
    quantised = {"quantization_config": {"quant_method": "bitnet"}}
    config = CONFIG | ({"text_config": quantised} if nested else quantised)
    refused(write(tmp_path / "x", config=config), UnsupportedModelError, "'bitnet'", "dequantise")


def test_missing_shard(tmp_path: Path) -> None:
    path = write_sharded(tmp_path / "x")
    (path / "two.safetensors").unlink()
    refused(path, MissingShardError, "two.safetensors")
    (path / "model.safetensors.index.json").unlink()
    refused(path, MissingShardError, "model.safetensors.index.json")
    # The index names a tensor that its shard lacks.
    path = write_sharded(tmp_path / "y", {"a": "one.safetensors", "c": "two.safetensors"})
    refused(path, MissingShardError, "two.safetensors", "tensor c")


LEADS_OUT = [{"a": shard} for shard in ("../one.safetensors", "/etc/x.safetensors", "", 3)]


@pytest.mark.parametrize(
    "text",
    [
        *("", "null", "{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'),
        *(json.dumps({"weight_map": weight_map}) for weight_map in LEADS_OUT),
    ],
)
def test_broken_index(tmp_path: Path, text: str) -> None:
    path = write_sharded(tmp_path / "x")
    (path / "model.safetensors.index.json").write_text(text)
    refused(path, CorruptShardError, "model.safetensors.index.json")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_clone_without_its_large_files(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / "x")
    (path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n")
    refused(path, CheckpointError, name, "git lfs pull")


def test_a_directory_in_a_shards_place(tmp_path: Path) -> None:
    path = write(tmp_path / "x")
    (path / "model.safetensors").unlink()
    (path / "model.safetensors").mkdir()
    refused(path, CheckpointError, "model.safetensors is no file")


ENTRY = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("shard", "words"),
    [
        (shard_bytes(GOOD)[:-3], ("tensor b", "truncated")),
        (shard_bytes(GOOD) + b"x", ("1 bytes",)),
        *(
            (struct.pack("<Q", length) + shard_bytes(GOOD)[8:], ("header",))
            for length in (0, 2**40, 2**64 - 1, 100_000_001)
        ),
        *((data, ()) for data in (b"", b"1234567", raw_shard([1], b""), raw_shard("{", b""))),
        *(
            (raw_shard({"weight": fields}, bytes(9)), ("tensor weight",))
            for fields in (
                {},
                {"dtype": "F32", "shape": [2], "data_offsets": [0]},
                {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
                {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]},
                {"dtype": "F32", "shape": [-2], "data_offsets": [8, 0]},
                {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]},
                {"dtype": "F32", "shape": "2", "data_offsets": [0, 8]},
                {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
                {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]},
                [],
            )
        ),
        (raw_shard({"a": ENTRY, "b": ENTRY | {"data_offsets": [2, 6]}}, bytes(6)), ("tensor b",)),
    ],
)
def test_a_damaged_shard(tmp_path: Path, shard: bytes, words: tuple[str, ...]) -> None:
    refused(write(tmp_path / "x", shard=shard), CorruptShardError, "model.safetensors", *words)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_shard_passes_only_if_its_header_reads_the_same(data: st.DataObject) -> None:
    """Any changed byte or truncation gives a typed error, or a header that still fits the file."""
    import tempfile

    good = shard_bytes(GOOD)
    with tempfile.TemporaryDirectory() as name:
        at = data.draw(st.integers(0, len(good) - 1))
        cut = data.draw(st.booleans())
        byte = data.draw(st.integers(0, 255))
        shard = good[:at] if cut else good[:at] + bytes([byte]) + good[at + 1 :]
        path = write(Path(name) / "x", shard=shard)
        try:
            tensors = read_files(path).tensors
        except CorruptShardError:
            return
        assert not cut
        assert len(tensors) == len(GOOD)


def test_digest_distinguishes_checkpoints(tmp_path: Path) -> None:
    digest = read_files(write(tmp_path / "one")).digest(GOOD)
    assert read_files(write(tmp_path / "same")).digest(GOOD) == digest
    config = json.dumps(CONFIG, indent=4)
    assert read_files(write(tmp_path / "spaces", config=config)).digest(GOOD) == digest
    others = [
        write(tmp_path / "config", config=CONFIG | {"top": 1}),
        write(tmp_path / "name", shard=shard_bytes({"z": GOOD["a"]})),
        write(tmp_path / "dtype", shard=shard_bytes(GOOD | {"b": ("F16", [4], 8)})),
        write(tmp_path / "bytes", shard=shard_bytes(GOOD, data=bytes(31) + b"x")),
    ]
    digests = {(files := read_files(path)).digest(files.tensors) for path in others}
    assert len(digests | {digest}) == 5
    # Bytes of a tensor that is not looked at are told by other digests.
    first, last = "a", "b"
    others = [
        write(tmp_path / f"x{i}", shard=shard_bytes(GOOD, data=bytes(31) + bytes([i])))
        for i in (0, 1)
    ]
    assert len({read_files(path).digest([first]) for path in others}) == 1
    assert len({read_files(path).digest([last]) for path in others}) == 2


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json"])
def test_an_unreadable_file(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = write(tmp_path / "model")
    (checkpoint / "tokenizer.json").write_text("{}")
    open_file = io.open

    def refuse(file: Any, *arguments: Any, **words: Any) -> Any:
        # Permissions do not stop root.
        if Path(file).name == name:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return open_file(file, *arguments, **words)

    monkeypatch.setattr(io, "open", refuse)
    with pytest.raises(CheckpointError, match=rf"{name}: Permission denied: .*chmod"):
        precheck(checkpoint, tokenizer=True)
