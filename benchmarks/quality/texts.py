"""Texts that the model has not seen, in windows of tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from eaas.errors import ConfigError

__all__ = ["cut", "held_out_texts", "read_text"]

# As `examples/train_demo.py` has them, so that it and this benchmark share a cache.
_CACHE = Path("build/train-demo/cache")
_VOCAB, _SEED = 4096, 1


def held_out_texts() -> dict[str, str]:
    """Return the demo model's held-out text by domain; the first call downloads Debian packages (100 MB).

    Raises:
        ConfigError: A package cannot be had.
    """
    from examples.demo_training.corpus import build_corpus
    from examples.demo_training.sources import SourceError

    try:
        tokenizer, corpus = build_corpus(_CACHE, _VOCAB, _SEED)
    except SourceError as error:
        raise ConfigError(f"{error}; or give a text of your own (--text)") from error
    return {domain: tokenizer.decode(ids) for domain, ids in corpus.held_out.items()}


def read_text(path: Path) -> str:
    """Read a user's text. Raises ConfigError if it cannot be read."""
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {path}: {error}") from error


def cut(
    texts: dict[str, str], encode: Callable[[str], Any], windows: int, length: int
) -> dict[str, torch.Tensor]:
    """Cut each text into windows at equal distances that do not overlap.

    Args:
        texts: Name -> text.
        encode: Returns a text's token ids.
        windows: Windows per text, at most.
        length: Tokens per window.

    Returns:
        Name -> ids (windows, length).

    Raises:
        ConfigError: A text is shorter than a window.
    """
    found = {}
    for name, text in texts.items():
        ids = np.asarray(encode(text), np.int64)
        count = min(windows, len(ids) // length)
        if not count:
            raise ConfigError(
                f"{name} has {len(ids)} tokens: give a longer text, or a lower --length"
            )
        starts = np.linspace(0, len(ids) - length, count).astype(int)
        found[name] = torch.from_numpy(np.stack([ids[s : s + length] for s in starts]))
    return found
