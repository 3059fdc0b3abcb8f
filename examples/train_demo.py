"""Train the demo model: a small Mixture-of-Experts model on four kinds of text.

    .venv/bin/python examples/train_demo.py --minutes 45 --out models/mine

Python's library, two Bibles, German documentation and manual pages: all free, see
`demo_training/sources.py`. The first run downloads Debian packages (100 MB) into the cache. Ctrl-C
saves; the same command goes on. The result is a directory for `make up MODEL=...`, with a model card.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from demo_training.card import write_result
from demo_training.corpus import CONTEXT, build_corpus
from demo_training.model import build_model
from demo_training.sources import SourceError
from demo_training.training import Progress as Trained
from demo_training.training import Settings, train

_VOCAB = 4096
_LINE_EVERY_S = 30.0


def main() -> None:
    """Read the options, train, write the model and its card."""
    options = _options()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    console = Console()
    try:
        tokenizer, corpus = build_corpus(options.cache, _VOCAB, options.seed)
    except SourceError as error:
        sys.exit(str(error))
    on_gpu = options.device == "cuda" or (options.device == "auto" and torch.cuda.is_available())
    device = torch.device("cuda" if on_gpu else "cpu")
    workers = 1 if on_gpu else options.workers
    settings = Settings(
        minutes=options.minutes,
        seed=options.seed,
        workers=workers,
        tokens=16_384 if on_gpu else 4096,
    )
    tokens = sum(len(ids) for ids in corpus.train.values())
    console.print(
        f"{tokens / 1e6:.1f} million tokens of text; {settings.minutes:g} minutes on {device.type} "
        f"with {workers} processes; checkpoints in {options.work}"
    )
    model = build_model(_VOCAB, CONTEXT, tokenizer.eos_token_id, device)
    with _Bar(console, settings) as bar:
        progress = train(model, corpus, settings, options.work, bar.show)
    if progress.worked_s < settings.minutes * 60:
        sys.exit(f"stopped and saved at step {progress.step}: the same command goes on from there")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    write_result(model, tokenizer, corpus, settings, progress, options.out)
    console.print(
        f"{options.out / 'README.md'} says how good it is; try it: make up MODEL={options.out}"
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=45.0, help="of training (default 45)")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--seed", type=int, default=1)
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--workers", type=int, default=cores, help="processes on a CPU")
    build = Path("build/train-demo")
    parser.add_argument("--cache", type=Path, default=build / "cache", help="packages and tokens")
    parser.add_argument(
        "--work", type=Path, default=build / "work", help="checkpoints to go on from"
    )
    parser.add_argument("--out", type=Path, default=Path("models/trained"), help="the result")
    return parser.parse_args()


class _Bar:
    """A progress bar in a terminal, otherwise a line every 30 s."""

    def __init__(self, console: Console, settings: Settings) -> None:
        self._console, self._total_s = console, settings.minutes * 60
        columns = (BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._bar.add_task("", total=self._total_s)
        self._next_line_s = time.monotonic()

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, progress: Trained) -> None:
        """Show the progress after a step."""
        text = (
            f"step {progress.step}, {progress.tokens / 1e6:.2f} M tokens, loss {progress.loss:.3f}, "
            f"unevenness {progress.unevenness:.2f}, {progress.tokens / progress.worked_s:.0f} tokens/s"
        )
        if self._console.is_terminal:
            self._bar.update(self._task, completed=progress.worked_s, description=text)
        elif time.monotonic() >= self._next_line_s:
            left_s = max(0.0, self._total_s - progress.worked_s)
            self._console.print(f"{text}, {left_s / 60:.1f} min left", soft_wrap=True)
            self._next_line_s = time.monotonic() + _LINE_EVERY_S


if __name__ == "__main__":
    main()
