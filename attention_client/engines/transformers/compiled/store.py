"""Where compiled passes are kept: one directory each, named by all that the code depends on."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from eaas.checkpoint import Checkpoint
from eaas.errors import ConfigError

__all__ = ["LIBRARY", "OPERATORS", "building", "cache_dir", "key_of", "library_of", "remove_old"]

LIBRARY, OPERATORS = "pass.so", "pass.json"
"""The compiled code with the weights, and torch's list of the operators that it calls."""
_SOURCES = (
    *("../paged/operators.py", "../paged/latent.py", "../rotary.py", "../model.py"),
    "build.py",
)
_MOST_KEPT = 8


def cache_dir() -> Path:
    """Return the directory of compiled passes, made if need be.

    Raises:
        ConfigError: It cannot be made, or other users may write to it: its files are run.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    path = Path(base) / "eaas" / "passes"
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"{path}: no directory for compiled passes ({error.strerror})") from None
    if found.st_uid != os.getuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{path}: other users may write to it; chmod 700, or set XDG_CACHE_HOME")
    return path


def key_of(checkpoint: Checkpoint, threads: int) -> str:
    """Name the pass of a checkpoint on this machine.

    Args:
        checkpoint: Its dense weights become part of the code.
        threads: Torch threads.
    """
    files = sorted(checkpoint.path.glob("*.safetensors"))
    facts = {
        "checkpoint": checkpoint.shape.digest,
        "files": [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files],
        "threads": threads,
        "versions": [torch.__version__, transformers.__version__],
        "cpu": _cpu(),
        "sources": [
            hashlib.sha256((Path(__file__).parent / source).read_bytes()).hexdigest()
            for source in _SOURCES
        ],
    }
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:32]


def _cpu() -> str:
    # The compiler uses all instructions of this machine.
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return line
    return str(torch.backends.cpu.get_cpu_capability())


def library_of(key: str) -> Path | None:
    """Return the compiled pass of this name; None: there is none."""
    path = cache_dir() / key / LIBRARY
    if not path.is_file() or not path.with_name(OPERATORS).is_file():
        return None
    os.utime(path.parent)
    return path


@contextlib.contextmanager
def building(key: str) -> Iterator[Path | None]:
    """Give the block an empty directory for this pass, which is complete at the end of the block.

    Waits for another process that builds it, and then gives None. What a killed process left is removed.
    """
    root = cache_dir()
    with (root / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if library_of(key) is not None:
            yield None
            return
        work = root / f"{key}.building"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(mode=0o700)
        try:
            yield work
            shutil.rmtree(root / key, ignore_errors=True)
            work.rename(root / key)
        finally:
            shutil.rmtree(work, ignore_errors=True)


def remove_old() -> None:
    """Remove passes that were not used for longest, beyond the 8 newest."""
    root = cache_dir()
    passes = [path for path in root.iterdir() if path.is_dir() and path.suffix != ".building"]
    passes.sort(key=lambda path: path.stat().st_mtime, reverse=True)
    for path in passes[_MOST_KEPT:]:
        shutil.rmtree(path, ignore_errors=True)
        (root / f"{path.name}.lock").unlink(missing_ok=True)
