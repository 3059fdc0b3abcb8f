"""Digests cover all bytes of an expert, and nothing else."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from damaged_copy import damaged_copy
from eaas.checkpoint import Checkpoint
from eaas.errors import ExpertMismatchError
from eaas_cli.demo_model import ARCHITECTURES, write_demo_model
from expert_server.experts.store import ExpertStore
from expert_server.kernels import KernelSpec, ReferenceKernel
from expert_server.weights.reader import ExpertReader

EXPERTS = 3
TINY: dict[str, Any] = {"layers": 2, "hidden": 32, "experts": EXPERTS, "top_k": 2, "vocab": 262}
Digests = dict[tuple[int, int], int]
Demo = Callable[..., Path]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Demo:
    """Writes a checkpoint once."""
    made: dict[tuple[str, str], Path] = {}

    def write(arch: str, shard_size: str = "1GB") -> Path:
        if (arch, shard_size) not in made:
            path = tmp_path_factory.mktemp("demo") / arch
            write_demo_model(path, arch, max_shard_size=shard_size, **TINY)
            made[arch, shard_size] = path
        return made[arch, shard_size]

    return write


def digests_of(checkpoint: Checkpoint) -> Digests:
    reader = ExpertReader(checkpoint)
    found = {
        (layer, expert): weights.digest
        for layer in range(checkpoint.shape.num_layers)
        for expert, weights in reader.read(layer, range(EXPERTS))
    }
    reader.release()
    return found


def store_of(path: Path) -> ExpertStore:
    reader = ExpertReader(Checkpoint.open(path))
    return ExpertStore(reader, ReferenceKernel(reader.forms, KernelSpec(reader.dtype)))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_each_bit_of_an_expert_changes_its_digest_only(arch: str, demo: Demo) -> None:
    checkpoint = Checkpoint.open(demo(arch))
    before = digests_of(checkpoint)
    assert len(set(before.values())) == len(before)

    @settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
    @given(st.data())
    def flip(data: st.DataObject) -> None:
        tensor = data.draw(st.sampled_from(checkpoint.expert_tensors))
        place = checkpoint.slice(tensor.key)
        at = data.draw(st.integers(0, place.nbytes - 1))
        bit = data.draw(st.integers(0, 7))
        expert = at * EXPERTS // place.nbytes if tensor.expert is None else tensor.expert
        with place.shard.path.open("r+b", buffering=0) as file:
            (byte,) = file.seek(place.offset + at) and file.read(1)
            for value in (byte ^ (1 << bit), byte):
                file.seek(place.offset + at)
                file.write(bytes([value]))
                after = digests_of(checkpoint)
                changed = {key for key in before if after[key] != before[key]}
                assert changed == ({(tensor.layer, expert)} if value != byte else set())

    flip()


@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss"])
def test_digests_do_not_depend_on_shards(arch: str, demo: Demo) -> None:
    whole, cut = Checkpoint.open(demo(arch)), Checkpoint.open(demo(arch, "20KB"))
    assert len(set(cut.keys.values())) > 3
    assert len(set(whole.keys.values())) == 1
    assert digests_of(whole) == digests_of(cut)
    assert whole.shape == cut.shape


def test_experts_in_one_tensor_have_the_digests_of_experts_in_one_each(demo, tmp_path) -> None:
    path = Path(shutil.copytree(demo("qwen3_moe"), tmp_path / "fused"))
    before = digests_of(Checkpoint.open(path))
    tensors = load_file(path / "model.safetensors")
    for layer in range(2):
        name = f"model.layers.{layer}.mlp.experts"
        parts = {
            part: torch.stack([tensors.pop(f"{name}.{e}.{part}.weight") for e in range(EXPERTS)])
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        gate_up = torch.cat([parts["gate_proj"], parts["up_proj"]], dim=1)
        tensors[f"{name}.gate_up_proj"] = gate_up
        tensors[f"{name}.down_proj"] = parts["down_proj"]
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    assert digests_of(Checkpoint.open(path)) == before


def test_the_checkpoint_digest_does_not_cover_experts(demo: Demo, tmp_path: Path) -> None:
    """So a damaged expert is reported as such, not as another model."""
    path = demo("qwen3_moe")
    checkpoint = Checkpoint.open(path)
    experts = damaged_copy(path, tmp_path / "experts", checkpoint.expert_keys())
    assert Checkpoint.open(experts).shape == checkpoint.shape
    (router,) = {key for key in checkpoint.other_keys() if "layers.1.mlp.gate." in key}
    other = damaged_copy(path, tmp_path / "router", [router])
    assert Checkpoint.open(other).shape != checkpoint.shape


# -- the store ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ["qwen3_moe", "gpt_oss"])
def test_an_expert_with_another_digest_is_not_held(arch: str, demo: Demo, tmp_path: Path) -> None:
    known = digests_of(Checkpoint.open(demo(arch)))
    tensor = [t for t in Checkpoint.open(demo(arch)).expert_tensors if t.layer == 1][1]
    copy = damaged_copy(demo(arch), tmp_path / "copy", [tensor.key])
    store = store_of(copy)
    store.load({0: [0, 2]}, digests=known)
    with pytest.raises(ExpertMismatchError) as caught:
        store.load({0: [1], 1: [1]}, digests=known)
    for word in (str(copy), tensor.key, "layer 1, expert 1", "copy the checkpoint again"):
        assert word in str(caught.value)
    assert store.held() == {0: [0, 1, 2], 1: []}
    assert store.digest(0, 2) == known[0, 2]
    assert store.digest(1, 1) == 0


def test_a_held_expert_with_another_digest_is_dropped(demo: Demo, tmp_path: Path) -> None:
    known = digests_of(Checkpoint.open(demo("qwen3_moe")))
    key = "model.layers.0.mlp.experts.1.up_proj.weight"
    store = store_of(damaged_copy(demo("qwen3_moe"), tmp_path / "copy", [key]))
    store.load({0: [0, 1], 1: [1]})
    assert store.digest(0, 1) not in (0, known[0, 1])
    with pytest.raises(ExpertMismatchError, match=r"up_proj.*layer 0, expert 1"):
        store.load({0: [0, 1, 2], 1: []}, digests=known)
    assert store.held() == {0: [0], 1: [1]}
    store.load({0: [0, 2]}, digests=known)
    assert store.held() == {0: [0, 2], 1: [1]}
