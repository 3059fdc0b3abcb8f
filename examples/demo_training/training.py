"""The training loop: seeded, and bounded by time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .corpus import Corpus
from .sources import DOMAINS

__all__ = ["Progress", "Settings", "train"]

_WARM_UP_STEPS = 60
_DECAY_FROM = 0.25  # of the time; from here the learning rate falls to 0
_LONG_FROM = 0.8  # of the time; long sequences come last, since they cost more


@dataclass(frozen=True)
class Settings:
    """How to train.

    Attributes:
        minutes: Duration.
        seed: Of the batches.
        tokens: Of a step.
        length: Tokens of a sequence; `long_length` in the last fifth of the time.
        rate: Highest learning rate.
    """

    minutes: float
    seed: int = 1
    tokens: int = 4096
    length: int = 256
    long_length: int = 1024
    rate: float = 2e-3


@dataclass
class Progress:
    """The progress so far; `loss` (nats a token) is a moving average."""

    step: int = 0
    tokens: int = 0
    worked_s: float = 0.0
    loss: float = 0.0


def train(
    model: Any, corpus: Corpus, settings: Settings, report: Callable[[Progress], None]
) -> Progress:
    """Train the model until the time is used; `report` is called after each step."""
    device = next(model.parameters()).device
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    progress = Progress()
    model.train()
    began = time.monotonic()
    while (used := progress.worked_s / (60 * settings.minutes)) < 1:
        length = settings.length if used < _LONG_FROM else settings.long_length
        ids_BT = _batch(corpus, settings, progress.step, length).to(device)
        for group in optimizer.param_groups:
            group["lr"] = settings.rate * _schedule(progress.step, used)
        out = model(input_ids=ids_BT, labels=ids_BT, use_cache=False, output_router_logits=True)
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        progress.tokens += settings.tokens
        progress.worked_s = time.monotonic() - began
        smooth = min(0.98, 1 - 1 / progress.step)
        progress.loss = smooth * progress.loss + (1 - smooth) * out.loss.item()
        report(progress)
    return progress


def _schedule(step: int, used: float) -> float:
    """Share of the highest learning rate: rises over the first steps, falls with the remaining time."""
    return min(1.0, (step + 1) / _WARM_UP_STEPS, (1 - used) / (1 - _DECAY_FROM))


def _batch(corpus: Corpus, settings: Settings, step: int, length: int) -> torch.Tensor:
    """Ids (B, length + 1): the domains in turn, each at random places."""
    rng = np.random.default_rng((settings.seed, step))
    rows = []
    for i in range(settings.tokens // length):
        ids = corpus.train[DOMAINS[(step + i) % len(DOMAINS)]]
        start = int(rng.integers(len(ids) - length))
        rows.append(ids[start : start + length + 1].astype(np.int64))
    return torch.from_numpy(np.stack(rows))
