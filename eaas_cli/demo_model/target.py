"""The directory of a demo model: it appears in one step, and replaces nothing but an earlier demo model."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eaas.errors import ConfigError

__all__ = ["MARK", "refuse_to_overwrite", "replacing"]

MARK = "demo_model.json"


def refuse_to_overwrite(target: Path) -> None:
    """Raise ConfigError if the path exists and is neither an empty directory nor a demo model."""
    if not target.exists():
        return
    if not target.is_dir():
        raise ConfigError(f"path {target} is a file: choose another path")
    if any(target.iterdir()) and not (target / MARK).is_file():
        raise ConfigError(
            f"path {target} holds something other than a demo model: choose another path"
        )


@contextmanager
def replacing(target: Path) -> Iterator[Path]:
    """Yield a new directory; it replaces the target at the end, or is deleted on an error.

    Raises ConfigError if the directory cannot be made.
    """
    target = target.absolute()
    new = target.with_name(f".{target.name}.{os.getpid()}.new")
    try:
        new.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"path {target} cannot be written: {error}") from error
    try:
        yield new
        if target.exists():
            old = target.with_name(f".{target.name}.{os.getpid()}.old")
            target.rename(old)
            new.rename(target)
            shutil.rmtree(old)
        else:
            new.rename(target)
    finally:
        shutil.rmtree(new, ignore_errors=True)
