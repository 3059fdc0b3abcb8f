"""Train the demo model: a small Mixture-of-Experts model on four kinds of text.

    .venv/bin/python examples/train_demo.py --minutes 45 --out models/mine

Python's library, two Bibles, German documentation and manual pages: all free, see
`demo_training/sources.py`. The first run downloads Debian packages (100 MB) into the cache. The result is
a directory for `make up MODEL=...`, with a model card.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch

from demo_training.card import write_result
from demo_training.corpus import CONTEXT, build_corpus
from demo_training.model import build_model
from demo_training.sources import SourceError
from demo_training.training import Progress, Settings, train

_VOCAB = 4096
_LINE_EVERY_S = 30.0


def main() -> None:
    """Read the options, train, write the model and its card."""
    options = _options()
    torch.manual_seed(options.seed)
    try:
        tokenizer, corpus = build_corpus(options.cache, _VOCAB, options.seed)
    except SourceError as error:
        sys.exit(str(error))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    settings = Settings(
        options.minutes, options.seed, tokens=16_384 if device.type == "cuda" else 4096
    )
    tokens = sum(len(ids) for ids in corpus.train.values())
    print(
        f"{tokens / 1e6:.1f} million tokens of text; {settings.minutes:g} minutes on {device.type}"
    )
    model = build_model(_VOCAB, CONTEXT, tokenizer.eos_token_id, device)
    progress = train(model, corpus, settings, _Lines())
    write_result(model, tokenizer, corpus, settings, progress, options.out)
    print(f"{options.out / 'README.md'} says how good it is; try it: make up MODEL={options.out}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=45.0, help="of training (default 45)")
    parser.add_argument("--seed", type=int, default=1)
    cache = Path("build/train-demo/cache")
    parser.add_argument("--cache", type=Path, default=cache, help="packages and tokens")
    parser.add_argument("--out", type=Path, default=Path("models/trained"), help="the result")
    return parser.parse_args()


class _Lines:
    """Prints a line every 30 s."""

    def __init__(self) -> None:
        self._next_s = time.monotonic()

    def __call__(self, progress: Progress) -> None:
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _LINE_EVERY_S
            print(
                f"step {progress.step}, {progress.tokens / 1e6:.2f} M tokens, loss {progress.loss:.3f}, "
                f"{progress.tokens / progress.worked_s:.0f} tokens/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
