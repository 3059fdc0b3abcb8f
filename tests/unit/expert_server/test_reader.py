"""The reader gives the same experts in chunks or at once, by transformers' rules or by direct reads."""

import gc
import os
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import Interleave, Transpose, WeightConverter

from eaas.checkpoint import Checkpoint, quiet_transformers
from eaas.errors import CorruptShardError, UnsupportedModelError
from expert_server.weights import reader as reader_module
from expert_server.weights.reader import ExpertReader
from expert_server.weights.weights import ExpertWeights
from quantized_checkpoint import SCHEMES, quantized_copy

WANTED = [7, 0, 3, 4, 6]


def tensors(weights: ExpertWeights) -> list[torch.Tensor]:
    every = (weights.up, weights.down, weights.up_bias, weights.down_bias)
    return [tensor for tensor in every if tensor is not None]


def read(
    checkpoint: Checkpoint, wanted: Sequence[int] = WANTED, layer: int = 0
) -> dict[int, list[torch.Tensor]]:
    """Copies of the reader's experts: a view is valid only until the next step."""
    reader = ExpertReader(checkpoint)
    found = {e: tensors(weights.copy(reader.dtype)) for e, weights in reader.read(layer, wanted)}
    assert list(found) == sorted(wanted)
    return found


def assert_same(ours: dict[int, list[torch.Tensor]], theirs: dict[int, list[torch.Tensor]]) -> None:
    assert ours.keys() == theirs.keys()
    for expert, expected in theirs.items():
        assert len(ours[expert]) == len(expected)
        assert all(torch.equal(a, b) for a, b in zip(ours[expert], expected, strict=True))


@pytest.mark.parametrize("in_chunk", [0, 1, 2, 3])
def test_chunks_make_no_difference(path, monkeypatch, in_chunk) -> None:
    checkpoint = Checkpoint.open(path)
    at_once = read(checkpoint)
    size = sum(tensor.nbytes for tensor in at_once[0])
    sizes = []
    stack = ExpertReader._stack

    def counted(self: ExpertReader, name: str, columns: list[Any], *rest: Any) -> torch.Tensor:
        sizes.append(len(columns[0]))
        return stack(self, name, columns, *rest)

    monkeypatch.setattr(ExpertReader, "_stack", counted)
    monkeypatch.setattr(reader_module, "_CHUNK_BYTES", in_chunk * size + size // 2)
    assert_same(read(checkpoint), at_once)
    # An expert larger than a chunk is read alone.
    most = max(1, in_chunk)
    assert set(sizes) == {most, len(WANTED) % most} - {0}


def test_direct_reads_equal_transformers_conversion(path, monkeypatch) -> None:
    checkpoint = Checkpoint.open(path)
    placed = read(checkpoint)
    monkeypatch.setattr(reader_module, "_only_stacks", lambda rule: False)
    assert_same(placed, read(checkpoint))


def rewrite(path: Path, change: dict[str, torch.dtype | tuple[int, ...]]) -> Checkpoint:
    """Change the dtype or shape of tensors in their shard."""
    checkpoint = Checkpoint.open(path)
    for shard in {path / checkpoint.keys[key] for key in change}:
        content = load_file(shard)
        for key, to in change.items():
            if key in content and isinstance(to, torch.dtype):
                content[key] = content[key].to(to)
            elif key in content:
                content[key] = content[key].flatten()[: torch.Size(to).numel()].view(to).clone()
        save_file(content, shard, metadata={"format": "pt"})
    return Checkpoint.open(path)


def test_parts_of_different_dtypes(copy: Path) -> None:
    """Step 1 of transformers' loading casts each tensor."""
    key = "model.layers.0.mlp.experts.{}.gate_proj.weight"
    checkpoint = rewrite(copy, {key.format(3): torch.bfloat16, key.format(4): torch.float64})
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(copy, experts_implementation="eager")
    experts = model.get_submodule(checkpoint.shape.layer_names[0])
    expected = {e: [experts.gate_up_proj[e], experts.down_proj[e]] for e in WANTED}
    assert_same(read(checkpoint), expected)


def test_one_expert_of_another_shape_is_corrupt(copy: Path) -> None:
    key = "model.layers.0.mlp.experts.3.gate_proj.weight"
    checkpoint = rewrite(copy, {key: (16, 64)})
    assert read(checkpoint, [0, 1, 2])
    with pytest.raises(CorruptShardError, match=r"experts\.gate_up_proj .*of one version"):
        read(checkpoint, [2, 3])
    with pytest.raises(CorruptShardError, match=r"is \(1, 48, 64\) where config.json says"):
        read(checkpoint, [3])


@pytest.mark.parametrize(
    ("operations", "undo"),
    [
        ([Transpose(1, 2)], lambda t: t.transpose(1, 2)),
        ([Transpose(1, 2, check_dims=True)], lambda t: t),
        ([Interleave(dim=1)], lambda t: t.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)),
    ],
    ids=["transpose", "checked", "interleave"],
)
def test_rules_that_do_more_than_stack(checkpoint, tmp_path, monkeypatch, operations, undo) -> None:
    """Rules as in other architectures, here for one tensor of all experts."""
    opened = Checkpoint.open(shutil.copytree(checkpoint("gpt_oss"), tmp_path / "oss"))
    name = f"{opened.shape.layer_names[0]}.gate_up_proj"
    whole = opened.slice(name)[...]
    shape = opened.expert_modules()[opened.shape.layer_names[0]].gate_up_proj.shape
    stored = undo(whole).contiguous()
    shard = opened.path / opened.keys[name]
    save_file({**load_file(shard), name: stored}, shard, metadata={"format": "pt"})

    mapping = Checkpoint.weight_mapping

    def with_rule(self: Checkpoint) -> list[Any]:
        # Rules keep state: create a new one each time.
        rule = WeightConverter(r"experts.gate_up_proj$", "experts.gate_up_proj", list(operations))
        return [*mapping(self), rule]

    monkeypatch.setattr(Checkpoint, "weight_mapping", with_rule)
    found = read(Checkpoint.open(opened.path))
    assert whole.shape == shape
    for expert in WANTED:
        assert torch.equal(found[expert][0], whole[expert])


def test_an_expert_stays_whole_while_the_next_ones_are_read(path, monkeypatch) -> None:
    checkpoint = Checkpoint.open(path)
    expected = [read(checkpoint, layer=n) for n in range(checkpoint.shape.num_layers)]
    monkeypatch.setattr(reader_module, "_CHUNK_BYTES", 1)
    reader = ExpertReader(checkpoint)
    with ThreadPoolExecutor(1) as ahead:
        for layer in range(len(expected)):
            found = {}
            for expert, weights in reader.read(layer, WANTED, ahead=ahead):
                ahead.submit(int).result()  # All that was to be read by now has been.
                found[expert] = tensors(weights.copy(reader.dtype))
            assert_same(found, expected[layer])


def test_reading_ahead_ends_with_the_reader_and_says_what_failed(copy, monkeypatch) -> None:
    monkeypatch.setattr(reader_module, "_CHUNK_BYTES", 1)
    reader = ExpertReader(Checkpoint.open(copy))
    with ThreadPoolExecutor(1) as ahead:
        first = reader.read(0, WANTED, ahead=ahead)
        next(first)
        first.close()  # type: ignore[attr-defined]
        reader.release()
        for shard in copy.glob("*.safetensors"):
            os.truncate(shard, shard.stat().st_size - 1000)
        with pytest.raises(CorruptShardError, match="safetensors"):
            list(reader.read(1, range(8), ahead=ahead))


def test_nothing_is_left_open_or_kept_after_release(copy: Path) -> None:
    def state() -> tuple[int, int]:
        gc.collect()
        shards = [e for e in Path("/proc/self/fd").iterdir() if e.resolve().parent == copy]
        return len(shards), sum(
            buffer.nbytes for buffers in reader._buffers for buffer in buffers.values()
        )

    reader = ExpertReader(Checkpoint.open(copy))
    for _ in reader.read(0, WANTED):
        pass
    opened, kept = state()
    assert opened > 0
    assert kept > 0
    reader.release()
    assert state() == (0, 0)


@pytest.mark.parametrize("name", ["fp8", "gptq-desc_act", "ct-int4", "awq", "mxfp4"])
@pytest.mark.parametrize("in_chunk", [1, 3])
def test_quantised_experts_are_read_as_they_are_stored(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    in_chunk: int,
) -> None:
    source = checkpoint("gpt_oss" if name == "mxfp4" else "qwen3_moe")
    plain = ExpertReader(Checkpoint.open(quantized_copy(source, tmp_path / "m", SCHEMES[name])))
    reader = ExpertReader(Checkpoint.open(tmp_path / "m"))
    assert reader.stored is not None
    assert plain.stored is None
    monkeypatch.setattr(reader_module, "_CHUNK_BYTES", in_chunk * reader.expert_bytes(0))
    with ThreadPoolExecutor(1) as ahead:
        found = [
            (expert, weights.to(torch.float32), weights.digest)
            for expert, weights in reader.read(1, WANTED, ahead=ahead)
        ]
    form = plain.forms[1]
    assert [expert for expert, _, _ in found] == sorted(WANTED)
    assert len({digest for _, _, digest in found}) == len(WANTED)
    for (_, weights, _), (_, exact) in zip(found, plain.read(1, WANTED), strict=True):
        for got, wanted in zip(
            (weights.up, weights.down), (exact.plain(form).up, exact.plain(form).down), strict=True
        ):
            torch.testing.assert_close(got, wanted, rtol=0, atol=SCHEMES[name].atol)


def test_experts_of_several_formats_are_refused(checkpoint, tmp_path) -> None:
    plain = quantized_copy(checkpoint(), tmp_path / "m", SCHEMES["fp8"])
    stored, exact = (load_file(path / "model.safetensors") for path in (tmp_path / "m", plain))
    for name in [name for name in stored if ".layers.1.mlp.experts." in name]:
        del stored[name]
        if name in exact:
            stored[name] = exact[name]
    save_file(stored, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        UnsupportedModelError,
        match=r"several number formats: \S+0\S+ is fp8 .*1\S+ is not quantised",
    ):
        ExpertReader(Checkpoint.open(tmp_path / "m"))
