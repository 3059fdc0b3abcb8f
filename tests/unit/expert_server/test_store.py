"""Servers hold only their experts, in every layout, and together compute the whole model's result."""

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from eaas.checkpoint import Checkpoint, quiet_transformers
from eaas.checkpoint.pieces import PIECE_BYTES
from eaas.checkpoint.shard import TensorSlice
from eaas.errors import CheckpointError, CorruptShardError, MissingShardError
from eaas_cli.demo_model import write_demo_model
from expert_server.experts.store import ExpertStore
from expert_server.kernels import KernelSpec, Quantization, ReferenceKernel, _native
from expert_server.kernels.native import NativeKernel
from expert_server.weights.reader import ExpertReader
from expert_server.weights.weights import ExpertWeights
from quantized_checkpoint import Scheme, fp8, mxfp4, quantized_copy


def held(
    checkpoint: Checkpoint, quantization: Quantization = Quantization.NONE, **options: Any
) -> tuple[ExpertStore, ReferenceKernel]:
    """An empty store and its kernel."""
    reader = ExpertReader(checkpoint)
    kernel = ReferenceKernel(reader.forms, KernelSpec(reader.dtype, quantization))
    return ExpertStore(reader, kernel, **options), kernel


def store_of(path: Path, **options: Any) -> ExpertStore:
    return held(Checkpoint.open(path), **options)[0]


def weights(kernel: ReferenceKernel, layer: int, expert: int) -> ExpertWeights:
    return kernel._packed[layer, expert]


def shares(checkpoint: Checkpoint, servers: int) -> list[dict[int, list[int]]]:
    """A random split of all experts over servers, different in every layer."""
    rng = torch.Generator().manual_seed(servers)
    wanted: list[dict[int, list[int]]] = [{} for _ in range(servers)]
    for layer in range(checkpoint.shape.num_layers):
        owner_E = torch.randint(servers, (checkpoint.shape.num_experts,), generator=rng)
        for server, experts in enumerate(wanted):
            experts[layer] = torch.nonzero(owner_E == server).flatten().tolist()
    return wanted


def request(
    shape: Any, tokens: int, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x_TH, ids_TK, scores_TK."""
    rng = torch.Generator().manual_seed(seed)
    ids_TK = torch.rand(tokens, shape.num_experts, generator=rng).argsort(1)[:, : shape.top_k]
    return (
        torch.randn(tokens, shape.hidden_size, generator=rng),
        ids_TK,
        torch.rand(ids_TK.shape, generator=rng),
    )


@pytest.mark.parametrize("servers", [1, 2, 3])
def test_stores_together_equal_the_whole_model(path: Path, servers: int) -> None:
    checkpoint = Checkpoint.open(path)
    wanted = shares(checkpoint, servers)
    pairs = [held(checkpoint) for _ in wanted]
    for (store, _), experts in zip(pairs, wanted, strict=True):
        assert store.load(experts) == store.bytes
    assert sum(store.count for store, _ in pairs) == 8 * checkpoint.shape.num_layers
    with quiet_transformers():
        model = AutoModelForCausalLM.from_pretrained(path, experts_implementation="eager")
    for layer, name in enumerate(checkpoint.shape.layer_names):
        x_TH, ids_TK, scores_TK = request(checkpoint.shape, 13, seed=layer)
        with torch.inference_mode():
            expected_TH = model.get_submodule(name)(x_TH, ids_TK, scores_TK)
        out_TH = torch.zeros_like(x_TH)
        for (_, kernel), experts in zip(pairs, wanted, strict=True):
            mine_TK = torch.isin(ids_TK, torch.tensor(experts[layer], dtype=torch.int64))
            out_TH += kernel(x_TH, ids_TK.where(mine_TK, -1).int(), scores_TK, layer)
        assert expected_TH.abs().max() > 0.1
        difference = (out_TH - expected_TH).abs().max().item()
        assert difference == 0 if servers == 1 else difference < 1e-5


def test_loading_is_incremental_and_idempotent(path: Path) -> None:
    checkpoint = Checkpoint.open(path)
    store, kernel = held(checkpoint)
    one = store.load({0: [3]})
    assert one > 0
    assert store.load({0: [3]}) == 0
    assert store.load({0: [3, 1, 1], 1: {5}}) == 2 * one
    assert [store.holds(0, 3), store.holds(0, 2), store.holds(1, 5)] == [True, False, True]
    assert (store.count, store.bytes) == (3, 3 * one)
    whole, whole_kernel = held(checkpoint)
    whole.load({0: range(8), 1: range(8)})
    for layer, expert in [(0, 3), (0, 1), (1, 5)]:
        ours, theirs = weights(kernel, layer, expert), weights(whole_kernel, layer, expert)
        assert torch.equal(ours.down, theirs.down)
        assert torch.equal(ours.up, theirs.up)
    store.unload({0: [1, 7], 1: [0]})
    assert (store.count, store.bytes) == (2, 2 * one)
    assert not store.holds(0, 1)
    assert store.load({0: [1]}) == one


def test_packed_tensors_own_their_memory(path: Path) -> None:
    """No tensor keeps a shard or its neighbours' weights alive."""
    store, kernel = held(Checkpoint.open(path))
    store.load({0: [2, 3, 6]})
    for expert in (2, 3, 6):
        one = weights(kernel, 0, expert)
        for tensor in (one.up, one.down, one.up_bias, one.down_bias):
            if tensor is not None:
                assert tensor.untyped_storage().nbytes() == tensor.nbytes
                assert tensor.is_contiguous()


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of all reads from shards."""
    sizes: list[int] = []
    really_read = TensorSlice.read_into

    def counted(part: TensorSlice, buffer: memoryview, *pause: Any) -> None:
        sizes.append(len(buffer))
        really_read(part, buffer, *pause)

    monkeypatch.setattr(TensorSlice, "read_into", counted)
    return sizes


def test_other_experts_shards_are_not_opened(copy: Path) -> None:
    checkpoint = Checkpoint.open(copy)
    needed = {
        checkpoint.keys[t.key] for t in checkpoint.expert_tensors if (t.layer, t.expert) == (1, 2)
    }
    for shard in set(checkpoint.keys.values()) - needed:
        (copy / shard).unlink()
    store = held(checkpoint)[0]
    assert store.load({1: [2]}) > 0
    lost = next(t for t in checkpoint.expert_tensors if checkpoint.keys[t.key] not in needed)
    with pytest.raises(MissingShardError, match=checkpoint.keys[lost.key]):
        store.load({layer: range(8) for layer in range(3)})
    assert store.holds(1, 2)


def test_a_shard_broken_after_opening_is_named(copy: Path) -> None:
    checkpoint = Checkpoint.open(copy)
    tensor = next(t for t in checkpoint.expert_tensors if (t.layer, t.expert) == (2, 3))
    shard = copy / checkpoint.keys[tensor.key]
    shard.write_bytes(shard.read_bytes()[:-1])
    store = held(checkpoint)[0]
    assert store.load({0: [0]}) > 0
    with pytest.raises(CorruptShardError, match=rf"{shard.name}: tensor model\.layers\.2"):
        store.load({2: [3]})


def test_shapes_that_contradict_config_json_are_corrupt(copy: Path) -> None:
    config = copy / "config.json"
    text = config.read_text()
    assert '"moe_intermediate_size": 32' in text
    config.write_text(text.replace('"moe_intermediate_size": 32', '"moe_intermediate_size": 16'))
    with pytest.raises(CorruptShardError, match=r"experts\.\w+ is .* where config.json says"):
        store_of(copy).load({0: [0]})


def test_an_expert_that_cannot_be_quantised_is_named(copy: Path) -> None:
    checkpoint = Checkpoint.open(copy)
    tensor = next(t for t in checkpoint.expert_tensors if (t.layer, t.expert) == (1, 5))
    shard = copy / checkpoint.keys[tensor.key]
    tensors = load_file(shard)
    tensors[tensor.key][3, 4] = torch.nan
    save_file(tensors, shard, metadata={"format": "pt"})
    store = held(Checkpoint.open(copy), Quantization.INT8)[0]
    assert store.load({0: [0]}) > 0
    with pytest.raises(CheckpointError, match=r"^layer 1, expert 5: weights are NaN or infinite"):
        store.load({1: [4, 5, 6]})
    assert [store.holds(1, expert) for expert in (4, 5, 6)] == [True, False, False]
    assert store.count == 2


def test_a_failed_load_leaves_the_replica_that_was_there(copy: Path) -> None:
    store, kernel = held(Checkpoint.open(copy), Quantization.INT8)
    one = store.load({0: [0]})
    before = weights(kernel, 0, 0)
    bad = ExpertWeights(torch.full_like(before.up, torch.inf), before.down)
    with pytest.raises(CheckpointError):
        kernel.load(0, 0, bad)
    assert weights(kernel, 0, 0) is before
    kernel.load(0, 0, ExpertWeights(2 * before.up, before.down))
    assert torch.equal(weights(kernel, 0, 0).down, before.down)
    assert not torch.equal(weights(kernel, 0, 0).up, before.up)
    assert (store.count, store.bytes) == (1, one)


def test_a_layer_without_tensors_is_missing(copy: Path) -> None:
    """The other layers are served: only the first load of the layer says what is missing."""
    index = copy / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    layer = "layers.1.mlp.experts"
    places = content["weight_map"]
    content["weight_map"] = {name: file for name, file in places.items() if layer not in name}
    index.write_text(json.dumps(content))
    store = store_of(copy)
    assert store.load({2: [0]}) > 0
    with pytest.raises(MissingShardError, match=r"layers\.1\.mlp\.experts"):
        store.load({1: [0]})


def test_computation_continues_during_loads(copy: Path) -> None:
    store, kernel = held(Checkpoint.open(copy))
    store.load({0: [0]})
    x_TH, scores_TK = torch.ones(2, 64), torch.ones(2, 1)
    ids_TK = torch.zeros(2, 1, dtype=torch.int32)
    expected_TH = kernel(x_TH, ids_TK, scores_TK, 0)
    done, wrong = threading.Event(), []

    def read() -> None:
        while not done.is_set():
            if not torch.equal(kernel(x_TH, ids_TK, scores_TK, 0), expected_TH):
                wrong.append(1)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    others = {layer: range(1, 8) for layer in range(3)}
    loaders = [threading.Thread(target=store.load, args=(others,)) for _ in range(2)]
    for thread in loaders:
        thread.start()
    for thread in loaders:
        thread.join()
    store.unload(others)
    done.set()
    for thread in readers:
        thread.join()
    assert not wrong
    assert store.count == 1


def test_loads_while_serving_take_one_core_and_keep_the_order(copy, monkeypatch) -> None:
    """The first load has all threads; later ones run with one."""
    threads: list[int] = []
    layers: list[int] = []
    pack, plain = ReferenceKernel.pack, ExpertReader.read

    def seen(*arguments: Any) -> ExpertWeights:
        threads.append(torch.get_num_threads())
        return pack(*arguments)

    def read(reader: ExpertReader, layer: int, *rest: Any) -> Any:
        layers.append(layer)
        return plain(reader, layer, *rest)

    monkeypatch.setattr(ReferenceKernel, "pack", seen)
    monkeypatch.setattr(ExpertReader, "read", read)
    torch.set_num_threads(2)
    store = store_of(copy)
    store.load({0: [0]})
    store.load({2: [0], 0: [1], 1: [2]})
    assert threads == [2, 1, 1, 1]
    assert layers == [0, 2, 0, 1]
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(torch.get_num_threads).result() == 2
    assert torch.get_num_threads() == 2


def test_the_loader_checks_for_requests_before_each_piece(tmp_path, monkeypatch) -> None:
    """Also if a tensor has many pieces: here one of 2.4 MB."""
    write_demo_model(
        tmp_path / "m", "qwen3_moe", layers=1, hidden=1104, experts=3, top_k=2, vocab=400
    )
    # Bytes read and pieces packed since the last check.
    read, packed = [0], [0]

    class Looked:
        @property
        def is_busy(self) -> bool:
            read.append(0)
            packed.append(0)
            return False

        def wait_idle(self, timeout_s: float) -> None:
            raise AssertionError("nothing is waited for")

    really_read, really_pack = os.preadv, _native.pack

    def counted(fd: int, buffers: Any, offset: int) -> int:
        count = really_read(fd, buffers, offset)
        read[-1] += count
        return count

    def pack(rows: int, stride: int, n: int, words: int, *out: int) -> None:
        packed[-1] += 4 * n * words
        really_pack(rows, stride, n, words, *out)

    reader = ExpertReader(Checkpoint.open(tmp_path / "m"))
    kernel = NativeKernel(reader.forms, KernelSpec(reader.dtype))
    store = ExpertStore(reader, kernel, loop=Looked())
    store.load({0: [2]})  # Only a server that holds experts has requests to look for.
    monkeypatch.setattr(os, "preadv", counted)
    monkeypatch.setattr(_native, "pack", pack)
    loaded = store.load({0: [0, 1]})
    one = kernel.bytes // 3
    assert loaded == 2 * one > 2 * 3 * 2 * PIECE_BYTES
    assert PIECE_BYTES // 2 < max(read) <= PIECE_BYTES
    assert PIECE_BYTES // 2 < max(packed) <= PIECE_BYTES
    kernel.close()


def test_loads_while_serving_keep_the_rate(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    took: list[int] = []

    class Pace:
        def __init__(self, bytes_per_s: float) -> None:
            assert bytes_per_s == 1234

        def take(self, count: int) -> None:
            took.append(count)

    monkeypatch.setattr("expert_server.experts.store.Pace", Pace)
    store = store_of(copy, bytes_per_s=1234)
    store.load({0: [0, 1]})
    assert took == [], "no requests are served yet"
    before = store.bytes
    store.load({0: [0, 1, 2], 1: [3]})
    assert len(took) == 2
    assert sum(took) == store.bytes - before


def progress_of(store: ExpertStore, wanted: dict[int, Any]) -> list[tuple[int, int]]:
    """The progress after each expert of a load."""
    seen: list[tuple[int, int]] = []
    store.load(wanted, lambda: bool(seen.append(store.loading)))
    return seen


def test_the_progress_of_a_load_ends_at_its_total(path: Path, bytes_read: list[int]) -> None:
    """The total is known at the start and is what the load reads; replicas that are held do not count."""
    store = store_of(path)
    assert store.loading == (0, 0)
    store.load({0: [1]})
    bytes_read.clear()
    wanted = {0: [1, 6], 1: range(8), 2: []}
    seen = progress_of(store, wanted)
    total = sum(bytes_read)
    assert seen == [(total, total * done // 9) for done in range(1, 10)]
    assert store.loading == (0, 0)
    assert progress_of(store, wanted) == [], "all are held"


@pytest.mark.parametrize(
    ("architecture", "scheme"), [("qwen3_moe", fp8((16, 16))), ("gpt_oss", mxfp4())]
)
def test_quantised_experts_count_as_they_are_stored(
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    bytes_read: list[int],
    architecture: str,
    scheme: Scheme,
) -> None:
    quantized_copy(checkpoint(architecture), tmp_path / "model", scheme)
    bytes_read.clear()
    seen = progress_of(store_of(tmp_path / "model"), {1: range(8)})
    total = sum(bytes_read)
    assert seen == [(total, total * done // 8) for done in range(1, 9)]


def test_nothing_loads_after_a_load_that_ended_early(copy: Path) -> None:
    store = store_of(copy)
    seen: list[tuple[int, int]] = []
    store.load({0: range(8)}, lambda: bool(seen.append(store.loading)) or len(seen) == 2)
    total = seen[0][0]
    assert seen == [(total, total // 8), (total, total // 4)]
    assert store.loading == (0, 0)
    checkpoint = Checkpoint.open(copy)
    tensor = next(t for t in checkpoint.expert_tensors if (t.layer, t.expert) == (2, 3))
    (copy / checkpoint.keys[tensor.key]).unlink()
    store = held(checkpoint)[0]
    with pytest.raises(MissingShardError):
        store.load({2: [3]})
    assert store.loading == (0, 0)


def test_spare_replicas_are_no_part_of_the_share(copy: Path) -> None:
    store = store_of(copy)
    one = store.load({0: [0, 1], 1: [2]}) // 3
    store.load_spares({(0, 3), (1, 2), (2, 5)}, lambda: False, {})
    # (1, 2) is of the share already.
    assert store.spares == {(0, 3), (2, 5)}
    assert (store.count, store.bytes, store.expert_bytes) == (3, 5 * one, one)
    assert store.held() == {0: [0, 1], 1: [2], 2: []}
    assert store.holds(0, 3)
    # A share takes a spare replica over without reading it again.
    assert store.load({0: [3]}) == 0
    assert (store.spares, store.count) == ({(2, 5)}, 4)
    store.unload_spares({(2, 5)})
    assert store.spares == {(2, 5)}
    store.unload_spares()
    assert not store.spares
    assert (store.count, store.bytes) == (4, 4 * one)


def test_spare_replicas_keep_to_the_memory(copy: Path) -> None:
    one = store_of(copy).load({0: [0]})
    store = store_of(copy, memory_bytes=4 * one)
    store.load({0: [0, 1]})
    store.load_spares({(1, 0), (1, 1), (1, 2)}, lambda: False, {})
    assert store.spares == {(1, 0), (1, 1)}
    assert store.bytes == 4 * one


def test_an_unread_spare_replica_leaves_the_others(copy: Path) -> None:
    store = store_of(copy)
    store.load({0: [0]})
    with pytest.raises(CheckpointError, match="differs"):
        store.load_spares({(0, 1), (1, 0)}, lambda: False, {(1, 0): 1})
    assert store.spares == {(0, 1)}
    assert store.count == 1
