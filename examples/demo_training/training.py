"""The training loop: resumable, seeded, and bounded by its working time."""

from __future__ import annotations

import json
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from .corpus import Corpus
from .model import losses
from .optimizer import Optimizer
from .sources import DOMAINS
from .workers import Workers

__all__ = ["Progress", "Settings", "train"]

_WARM_UP_STEPS = 60
_DECAY_FROM = 0.25  # of the time; from here the learning rate falls to 0
# The first worker's share of a worker's sequences: it also updates the weights.
_FIRST_PART = 0.75
_LONG_FROM = 0.8  # of the time; long sequences come last, since they cost more


@dataclass(frozen=True)
class Settings:
    """How to train.

    Attributes:
        minutes: Of work; pauses (a stopped process, a suspended machine) do not count.
        workers: Processes, each with one thread and `sequences` of the batch.
        tokens: Of a step.
        length: Tokens of a sequence; `long_length` in the last fifth of the time.
        rate: Highest learning rate.
        evenness: Weight of the auxiliary loss that spreads tokens over experts. Small: experts
            may take to a domain.
        save_every_s: Between checkpoints.
    """

    minutes: float
    seed: int = 1
    workers: int = 2
    tokens: int = 4096
    length: int = 256
    long_length: int = 1024
    rate: float = 3e-3
    evenness: float = 0.01
    save_every_s: float = 180.0


@dataclass
class Progress:
    """The progress, as stored in `state.json`."""

    step: int = 0
    tokens: int = 0
    worked_s: float = 0.0
    loss: float = 0.0
    unevenness: float = 0.0
    history: list[tuple[int, float]] = field(default_factory=list)


def train(
    model: Any,
    corpus: Corpus,
    settings: Settings,
    directory: Path,
    report: Callable[[Progress], None],
) -> Progress:
    """Train until the time is used, or until SIGINT or SIGTERM; save in either case.

    Goes on from `directory` where it holds a checkpoint. The model's weights are the result.
    """
    device = next(model.parameters()).device
    optimizer, progress = Optimizer(model), Progress()
    if (directory / "state.json").is_file():
        progress = _load(directory, optimizer)

    def compute(ids_BT: torch.Tensor) -> list[float]:
        loss, unevenness = losses(model, ids_BT.to(device))
        (loss + settings.evenness * unevenness).backward()  # type: ignore[no-untyped-call]
        return [loss.item(), unevenness.item()]

    workers = Workers(model, settings.workers, compute, most_ids=2 * settings.tokens, figures=2)
    clock, budget_s = _WorkClock(), settings.minutes * 60
    saved_s = progress.worked_s
    with _StopAsked() as stop:
        while progress.worked_s < budget_s and not stop.asked:
            used = progress.worked_s / budget_s
            length = settings.length if used < _LONG_FROM else settings.long_length
            parts = _batch(corpus, settings, progress.step, length)
            gradients, (loss, unevenness) = workers.gradients(parts)
            rate = settings.rate * _schedule(progress.step, used)
            optimizer.step(gradients, progress.step + 1, rate)
            progress.step += 1
            progress.tokens += settings.tokens
            progress.worked_s += clock.tick()
            smooth = min(0.98, 1 - 1 / progress.step)
            progress.loss = smooth * progress.loss + (1 - smooth) * loss
            progress.unevenness = smooth * progress.unevenness + (1 - smooth) * unevenness
            if progress.step % 20 == 0:
                progress.history.append((progress.tokens, round(progress.loss, 4)))
            report(progress)
            if progress.worked_s - saved_s >= settings.save_every_s:
                _save(directory, optimizer, progress)
                saved_s = progress.worked_s
                clock.skip()
    _save(directory, optimizer, progress)
    return progress


def _schedule(step: int, used: float) -> float:
    """Share of the highest learning rate: rises over the first steps, falls with the remaining time."""
    return min(1.0, (step + 1) / _WARM_UP_STEPS, max(0.0, (1 - used) / (1 - _DECAY_FROM)))


def _batch(corpus: Corpus, settings: Settings, step: int, length: int) -> list[torch.Tensor]:
    """Ids (B, length + 1) for each worker; the domains in turn, each at random places."""
    rng = np.random.default_rng((settings.seed, step))
    count = settings.tokens // length
    rows = []
    for i in range(count):
        ids = corpus.train[DOMAINS[(step + i) % len(DOMAINS)]]
        start = int(rng.integers(len(ids) - length))
        rows.append(ids[start : start + length + 1].astype(np.int64))
    ids_BT = torch.from_numpy(np.stack(rows))
    if settings.workers == 1:
        return [ids_BT]
    first = max(1, int(count / settings.workers * _FIRST_PART))
    return [ids_BT[:first], *ids_BT[first:].chunk(settings.workers - 1)]


class _WorkClock:
    """Seconds of each step; a step during which the process was stopped counts as an ordinary one."""

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._recent: deque[float] = deque(maxlen=31)

    def tick(self) -> float:
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        if self._recent:
            usual = statistics.median(self._recent)
            if seconds > 10 * usual:
                return usual
        self._recent.append(seconds)
        return seconds

    def skip(self) -> None:
        """Exclude the time since the last tick from training."""
        self._last = time.monotonic()


class _StopAsked:
    """Turn the first SIGINT or SIGTERM into a request to stop; the second one ends the process."""

    def __enter__(self) -> _StopAsked:
        self.asked = False
        self._before = {s: signal.signal(s, self._ask) for s in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(number, signal.SIG_DFL)


def _save(directory: Path, optimizer: Optimizer, progress: Progress) -> None:
    """Write both files atomically: the state names its file of tensors."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = directory / f"step-{progress.step}.safetensors"
    save_file(optimizer.state, tensors)
    new = directory / "state.json.new"
    new.write_text(json.dumps(asdict(progress)))
    new.replace(directory / "state.json")
    for old in directory.glob("step-*.safetensors"):
        if old != tensors:
            old.unlink()


def _load(directory: Path, optimizer: Optimizer) -> Progress:
    progress = Progress(**json.loads((directory / "state.json").read_text()))
    optimizer.load(load_file(directory / f"step-{progress.step}.safetensors"))
    return progress
