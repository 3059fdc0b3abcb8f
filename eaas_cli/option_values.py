"""For commands and benchmarks: parsers of option values. Errors name the option and what it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

from eaas.errors import ConfigError

__all__ = [
    "known",
    "log_directory",
    "numbers",
    "once",
    "positive_numbers",
    "refuse_unwritable",
    "words",
]

_T = TypeVar("_T")


def words(text: str) -> tuple[str, ...]:
    """Split an option's text at commas; keep each word once."""
    return once([word.strip() for word in text.split(",")])


def numbers(option: str, text: str, least: int = 1) -> list[int]:
    """Parse whole numbers of at least `least`, separated by commas; repeats stay. Raises ConfigError."""
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < least:
        raise ConfigError(
            f"{option} {text}: give whole numbers of at least {least}, with commas between"
        )
    return found


def positive_numbers(option: str, text: str) -> list[float]:
    """Parse an option's numbers above 0, separated by commas; repeats stay. Raises ConfigError."""
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = []
    if not found or not all(0 < value < math.inf for value in found):
        raise ConfigError(f"{option} {text}: give numbers above 0, with commas between")
    return found


def known(option: str, names: Sequence[str], choices: Sequence[str]) -> tuple[str, ...]:
    """Check an option's names against the choices; keep each once. Raises ConfigError for any other name."""
    for name in names:
        if name not in choices:
            raise ConfigError(f"{option} {name}: give one of {', '.join(choices)}")
    return once(names)


def once(values: Sequence[_T]) -> tuple[_T, ...]:
    """Keep each value once, in order of first appearance."""
    return tuple(dict.fromkeys(values))


def log_directory(text: str) -> Path:
    """Parse --log-dir. Raises ConfigError if it is empty: `Path("")` is the current directory."""
    if not text:
        raise ConfigError("--log-dir is empty: give a directory, or leave it out to keep no logs")
    return Path(text)


def refuse_unwritable(option: str, path: Path) -> None:
    """Raise ConfigError if an option's file cannot be written. Commands call it before long work."""
    is_new = not path.exists()
    try:
        path.open("ab").close()
        if is_new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}; give another file") from error
