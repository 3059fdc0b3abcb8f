"""Compiles a model's forward pass beside the attention client, which serves uncompiled until then."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import torch

from attention_client.engines.transformers.compiled.store import key_of, library_of
from attention_client.engines.transformers.model import serving_dtype
from attention_client.engines.transformers.paged.model import Pass
from eaas.checkpoint import Checkpoint
from eaas.errors import ConfigError
from eaas.free_memory import free_bytes
from eaas.log import get_logger

__all__ = ["PassCompiler"]

_log = get_logger(__name__)
_LONGEST_S = 3600.0
_CLOSE_S = 5.0
# Of the dense weights in memory, while they are compiled: 10 GB for gpt-oss-20b's 3.6.
_COPIES = 3


class PassCompiler:
    """Gets the compiled pass of a checkpoint: from the store, or by a process of low priority.

    Args:
        checkpoint: The model.
        threads: Torch threads.
    """

    def __init__(self, checkpoint: Checkpoint, threads: int) -> None:
        self._checkpoint = checkpoint
        self._threads = threads
        self._closed = False
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._thread: threading.Thread | None = None

    def start(self, use: Callable[[Pass], None]) -> None:
        """Begin in a thread of its own; `use` gets the pass. If there is none, the log says why."""
        self._thread = threading.Thread(target=self._run, args=(use,), name="compile", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the compilation. Idempotent."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                _kill(self._process)
        if self._thread is not None:
            self._thread.join(_CLOSE_S)

    def _run(self, use: Callable[[Pass], None]) -> None:
        started = time.monotonic()
        try:
            key = key_of(self._checkpoint, self._threads)
            library = library_of(key)
            if library is None:
                self._build()
                library = library_of(key)
            if library is None or self._closed:
                return
            use(torch._C._aoti.AOTIModelContainerRunnerCpu(str(library), 1).run)
            _log.info("forward passes are compiled (after %.1f s)", time.monotonic() - started)
        except (ConfigError, OSError, RuntimeError) as error:
            _log.warning("forward passes stay uncompiled: %s", error)

    def _build(self) -> None:
        if shutil.which("g++") is None:
            raise ConfigError("compiling them needs g++, which is not installed")
        _refuse_little_memory(self._checkpoint)
        words = [
            *(sys.executable, "-m", "attention_client.engines.transformers.compiled.build"),
            *(str(os.getpid()), str(self._checkpoint.path), str(self._threads)),
        ]
        with tempfile.TemporaryFile() as output:
            with self._lock:
                if self._closed:
                    return
                self._process = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    process_group=0,
                )
                _end_first(self._process)
            if not _ends_within(self._process.pid, _LONGEST_S):
                _kill(self._process)
                self._process.wait()
                raise ConfigError(f"compiling them took longer than {_LONGEST_S:.0f} s")
            code = self._process.wait()
            if code == -signal.SIGKILL and not self._closed:
                raise ConfigError("the compiler was killed: memory ran out, perhaps")
            if code != 0 and not self._closed:
                raise ConfigError(f"this model cannot be compiled ({_last_line(output)})")


def _refuse_little_memory(checkpoint: Checkpoint) -> None:
    """Raise ConfigError if a compilation would take more memory than is free: expert servers need it."""
    dense = sum(checkpoint.nbytes(name) for name in checkpoint.other_keys())
    dense *= serving_dtype(checkpoint).itemsize // getattr(torch, checkpoint.shape.dtype).itemsize
    needed, free = _COPIES * dense, free_bytes()
    if needed > free:
        raise ConfigError(
            f"compiling them takes about {needed / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free"
        )


def _end_first(process: subprocess.Popen[bytes]) -> None:
    """Have the system end this process first where memory runs out: the cluster serves without it."""
    with contextlib.suppress(OSError):
        Path(f"/proc/{process.pid}/oom_score_adj").write_text("1000")


def _ends_within(pid: int, seconds: float) -> bool:
    """Whether a child ends in time. `Popen.wait` with a timeout would look twenty times a second."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    try:
        return bool(poll.poll(1000 * seconds))
    finally:
        os.close(pidfd)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the process and the compilers that it has started, unless it has ended: its id may be another's."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _last_line(output: IO[bytes]) -> str:
    output.seek(0)
    lines = output.read().decode(errors="replace").strip().splitlines()
    return lines[-1][:300] if lines else "no message"
