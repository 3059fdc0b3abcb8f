"""The memory of the key-value cache."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig

from attention_client.engines.transformers.paged import cache
from attention_client.engines.transformers.paged.cache import (
    AttentionShape,
    PagedCache,
    windows_of,
)

SHAPE = AttentionShape(heads=2, key=8, value=8, is_latent=False)
PAGE = 16
# Keys and values of 2 heads x 8 x 2 bytes x 16 tokens, in each layer.
LAYER = 2 * 2 * 8 * 2 * PAGE
BLOCK = 2 * LAYER


def made(
    wanted: int | None = None, windows: tuple[int, ...] = (0, 0), sequences: int = 4
) -> PagedCache:
    shapes = dict.fromkeys(range(len(windows)), SHAPE)
    return PagedCache(shapes, list(windows), torch.bfloat16, PAGE, wanted, sequences)


@pytest.mark.parametrize(
    ("free", "expected"),
    [(4000 * BLOCK, 1000), (100 * BLOCK, 64), (1 << 40, (4 << 30) // BLOCK)],
)
def test_a_quarter_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, free: int, expected: int
) -> None:
    monkeypatch.setattr(cache, "free_bytes", lambda: free)
    assert made().blocks == [expected]


def test_a_wanted_size_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "free_bytes", lambda: 300 << 20)
    fits = (300 << 20) // BLOCK
    assert made(fits).blocks == [fits]
    with pytest.raises(MemoryError, match="it takes 300 MiB, and 300 MiB are free"):
        made(fits + 1)
    # What nobody asked for is no error.
    monkeypatch.setattr(cache, "free_bytes", lambda: 0)
    assert made().blocks == [64]


def test_a_window_leaves_its_room_to_the_other_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "free_bytes", lambda: 4 * 3000 * LAYER)
    found = made(windows=(40, 0, 40))
    assert found.kinds == {40: [0, 2], 0: [1]}
    # 4 sequences of 3 blocks, and the rest.
    assert found.blocks[0] == 12
    assert found.blocks[1] == 3000 - 2 * 12
    assert found.block_bytes == [2 * LAYER, LAYER]


def test_layers_are_apart() -> None:
    shapes = {0: SHAPE, 1: AttentionShape(1, 24, 8, False), 2: AttentionShape(1, 20, 16, True)}
    found = PagedCache(shapes, [0, 0, 0], torch.float32, 4, 5, 4)
    layers = found.layers(latent_heads=3)
    assert [layer.keys.shape[1:] for layer in layers.values()] == [(2, 8), (1, 24), (3, 20)]
    assert [layer.values.shape[1:] for layer in layers.values()] == [(2, 8), (1, 8), (3, 16)]
    for number, layer in layers.items():
        last = 4 * layer.block_rows + 3
        # Heads of latents are one row.
        layer.keys[last, 0] = number + 1
        layer.values[last, 0, 0] = number + 1
    for number, layer in layers.items():
        last = 4 * layer.block_rows + 3
        assert (layer.keys[last, 0] == number + 1).all()
        assert layer.values[last, 0, 0] == number + 1


def test_windows_follow_the_types_of_the_layers() -> None:
    config = LlamaConfig(num_hidden_layers=2)
    assert windows_of(config) == [0, 0]
    config.sliding_window = 7
    assert windows_of(config) == [7, 7]
    config.layer_types = ["full_attention", "sliding_attention"]
    assert windows_of(config) == [0, 7]
    config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(ValueError, match="layers of linear_attention"):
        windows_of(config)
