"""In a benchmark's process, shared by all: options, the end on SIGTERM, progress lines, the report."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import typer

from eaas.errors import ConfigError

if TYPE_CHECKING:
    import torch

__all__ = [
    "DEVICES",
    "command",
    "end_on_sigterm",
    "figure",
    "find_gpu",
    "model_or_demo",
    "ratio",
    "say",
    "show",
]

DEVICES = ("cpu", "cuda")
"""Values of the option --device."""


def end_on_sigterm() -> None:
    """Make SIGTERM end this benchmark like Ctrl-C, so that every `finally` runs."""
    signal.signal(signal.SIGTERM, lambda _number, _frame: sys.exit(128 + signal.SIGTERM))


def say(line: str) -> None:
    """Print a line of a benchmark's progress to standard error."""
    print(line, file=sys.stderr, flush=True)


def show(document: dict[str, Any], as_json: bool, report: Callable[[dict[str, Any]], None]) -> None:
    """Print a benchmark's result, as one JSON document or as a report."""
    if as_json:
        typer.echo(json.dumps(document))
    else:
        report(document)


def figure(value: float) -> float:
    """Round a figure to four significant digits, for a benchmark's document."""
    return float(f"{value:.4g}")


def find_gpu() -> torch.device:
    """Return the GPU that torch uses. Raises ConfigError: it finds none."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            "--device cuda: torch finds no GPU here; install a build of torch with CUDA on a machine "
            "that has one, or leave the option out"
        )
    return torch.device("cuda", torch.cuda.current_device())


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of the rounds' ratios, so that a slow minute of the machine meets both sides."""
    return figure(median(a / b for a, b in zip(ours, theirs, strict=True)))


@contextmanager
def model_or_demo(model: Path | None, **sizes: Any) -> Iterator[Path]:
    """Yield the given checkpoint's path, or that of a temporary demo checkpoint of these sizes.

    Raises CheckpointError: the files of the given one cannot be served.
    """
    if model is not None:
        from eaas.checkpoint import precheck

        # Before any process starts.
        precheck(model, tokenizer=True)
        yield model
        return
    from eaas_cli.demo_model import write_demo_model

    with tempfile.TemporaryDirectory(prefix="eaas-demo-") as scratch:
        path = Path(scratch) / "demo"
        write_demo_model(path, **sizes)
        yield path


def command(main: Callable[..., None]) -> typer.Typer:
    """Make the command of `python -m benchmarks.NAME` from its main function."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    return app
