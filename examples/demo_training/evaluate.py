"""Evaluation: loss on held-out text, and samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .corpus import Corpus
from .sources import DOMAINS

__all__ = ["SAMPLE_PROMPTS", "evaluate", "sample"]

_SEQUENCES, _LENGTH = 16, 512
SAMPLE_PROMPTS = {
    "code": 'def read_lines(path, encoding="utf-8"):\n    """Return',
    "prose": "And it came to pass in the evening that the men of the city",
    "german": "Mit diesem Befehl können Sie",
    "manual": "DESCRIPTION\n       The function returns a pointer to the",
}


@torch.no_grad()
def evaluate(model: Any, tokenizer: Any, corpus: Corpus) -> dict[str, tuple[float, float]]:
    """Read 8,192 held-out tokens of each domain: its loss (nats a token), and bits a byte of text."""
    found = {}
    for domain in DOMAINS:
        ids = corpus.held_out[domain]
        starts = np.linspace(0, len(ids) - _LENGTH - 1, _SEQUENCES).astype(int)
        rows = np.stack([ids[s : s + _LENGTH].astype(np.int64) for s in starts])
        ids_BT = torch.from_numpy(rows).to(model.device)
        loss = float(model(input_ids=ids_BT, labels=ids_BT, use_cache=False).loss)
        size = sum(len(tokenizer.decode(row[1:].tolist()).encode()) for row in rows)
        found[domain] = loss, loss * len(rows) * (_LENGTH - 1) / np.log(2) / size
    return found


@torch.no_grad()
def sample(model: Any, tokenizer: Any, prompt: str, tokens: int = 60) -> str:
    """A continuation, sampled as `generation_config.json` says, with a fixed seed."""
    torch.manual_seed(0)
    inputs = tokenizer(prompt, return_tensors="pt").to(model.device)
    ids = model.generate(**inputs, max_new_tokens=tokens)[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(ids, skip_special_tokens=True))
