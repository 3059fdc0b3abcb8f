"""Training of the demo model."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from demo_training import training
from demo_training.corpus import Corpus
from demo_training.model import Sizes, build_model
from demo_training.sources import DOMAINS
from demo_training.training import Settings, train

VOCAB, STEPS = 300, 40


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_it_learns_for_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each domain counts through the vocabulary with its own step, which is easy to learn.
    ids = {d: (np.arange(3000) * (i + 1) % VOCAB).astype(np.uint16) for i, d in enumerate(DOMAINS)}
    corpus = Corpus(train=ids, held_out=ids, bytes_read=dict.fromkeys(DOMAINS, 0))
    torch.manual_seed(1)
    sizes = Sizes(layers=2, hidden=64, experts=8, top_k=2, width=32)
    model = build_model(VOCAB, 64, 0, torch.device("cpu"), sizes)
    seconds = iter(range(STEPS + 1))
    monkeypatch.setattr(training.time, "monotonic", lambda: next(seconds))
    seen: list[float] = []
    settings = Settings(STEPS / 60, tokens=256, length=16, long_length=16)
    result = train(model, corpus, settings, lambda progress: seen.append(progress.loss))
    assert (result.step, result.tokens, result.worked_s) == (STEPS, STEPS * 256, STEPS)
    # What is reported is the mean over all steps so far.
    last = STEPS * seen[-1] - (STEPS - 1) * seen[-2]
    assert last < seen[0] - 0.3
