"""The size of the key-value cache."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.generation.continuous_batching.cache import PagedAttentionMemoryHandler

from attention_client.engines.transformers.paged import cache_size
from attention_client.engines.transformers.paged.cache_size import blocks_that_fit, sized_already

# 2 layers x (keys and values) x 2 heads x 8 x 2 bytes x 16 tokens.
CONFIG = LlamaConfig(
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32, head_dim=8
)
BLOCK = 2 * 2 * 2 * 8 * 2 * 16


def blocks(wanted: int | None = None) -> int:
    return blocks_that_fit(CONFIG, torch.bfloat16, 16, wanted)


@pytest.mark.parametrize(
    ("free", "expected"),
    [(4000 * BLOCK, 1000), (100 * BLOCK, 64), (1 << 40, (4 << 30) // BLOCK)],
)
def test_a_quarter_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, free: int, expected: int
) -> None:
    monkeypatch.setattr(cache_size, "free_bytes", lambda: free)
    assert blocks() == expected


def test_a_wanted_size_must_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_size, "free_bytes", lambda: 300 << 20)
    fits = (300 << 20) // BLOCK
    assert blocks(fits) == fits
    with pytest.raises(MemoryError, match="it takes 300 MiB, and 300 MiB are free"):
        blocks(fits + 1)
    # What nobody asked for is no error.
    monkeypatch.setattr(cache_size, "free_bytes", lambda: 0)
    assert blocks() == 64


def test_transformers_does_not_check_again() -> None:
    own = PagedAttentionMemoryHandler.get_available_memory
    handler = PagedAttentionMemoryHandler.__new__(PagedAttentionMemoryHandler)
    with sized_already():
        assert handler.get_available_memory() > 1 << 60
    assert PagedAttentionMemoryHandler.get_available_memory is own
