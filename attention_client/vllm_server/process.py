"""vLLM as a child process of `eaas vllm`: its start, its log and the end of all of its processes."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from attention_client.engines.vllm.worker_page import prune
from eaas import user_files
from eaas.net.server_records import started_at

__all__ = ["VllmProcess", "error_of"]

_PR_SET_CHILD_SUBREAPER = 36
_TAIL_LINES = 500
_SOCKETS = "vllm-sockets-"
_POLL_S = 0.05
_TRACKER = b"multiprocessing.resource_tracker"
_ALL: tuple[signal.Signals, None] = (signal.SIGKILL, None)
# Time for vLLM's children to follow the API server, and for all to follow a signal.
_FOLLOW_S = 1.0
# vLLM prints these when it ends in order.
_NOISE = re.compile(rb"nanobind: | - leaked | - \.\.\. skipped remainder|See https://nanobind")
_PREFIX = re.compile(
    r"^(?:\(\w+ pid=\d+\) )?(?:ERROR [\d-]+ [\d:]+ \[[^\]]*\] )?(?:\(\w+ pid=\d+\) )?"
)
_ERROR = re.compile(r"(?:\w+\.)*(\w*(?:Error|Exception|Exit)|KeyboardInterrupt): (.+)")
_INVALID = re.compile(r"\d+ validation errors? for ")
_USAGE = re.compile(r"\S+: error: (.+)")
# They only say that another process failed.
_CONSEQUENCES = ("Engine core initialization failed", "EngineCore encountered", "WorkerProc init")
_OURS = "eaas.errors."


def error_of(lines: Iterable[str]) -> str:
    """Find the cause of vLLM's end in its log: the message of an error of ours, else of the last error.

    Args:
        lines: The end of the log.
    """
    last, seen, awaited = "", "(nothing)", False
    for line in lines:
        text = _PREFIX.sub("", line.rstrip())
        seen = text or seen
        if awaited:
            # pydantic's cause is on the line after the error.
            last, awaited = text.strip().partition(" [type=")[0], False
            continue
        if usage := _USAGE.match(text):
            return usage[1]
        found = _ERROR.match(text)
        if found is None or found[2].startswith(_CONSEQUENCES):
            continue
        if text.startswith(_OURS):
            return found[2]
        last = f"{found[1]}: {found[2]}"
        awaited = _INVALID.match(found[2]) is not None
    return last or seen


class VllmProcess:
    """vLLM's API server and the processes that it starts, in a process group of their own. Starts at once.

    Args:
        words: Arguments of Python.
        environment: Environment of the process.
    """

    def __init__(self, words: Sequence[str], environment: Mapping[str, str]) -> None:
        # vLLM's processes whose parent has ended become children of this one, which then waits for them.
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        sockets = _socket_directory()
        own = {} if sockets is None else {"VLLM_RPC_BASE_PATH": str(sockets)}
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.start", str(os.getpid()), *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=own | dict(environment),
            process_group=0,
        )
        self._tail: deque[bytes] = deque(maxlen=_TAIL_LINES)
        self._log = threading.Thread(target=self._relay, name="vllm-log", daemon=True)
        self._log.start()

    def poll(self) -> int | None:
        """Return the exit code of the API server, negative for a signal; None while it runs."""
        return self._process.poll()

    def why(self) -> str:
        """Describe in one line why vLLM ended."""
        # The last lines may be on their way.
        self._log.join(_FOLLOW_S)
        return error_of(line.decode(errors="replace") for line in tuple(self._tail))

    def end(self, grace_s: float) -> None:
        """End all of vLLM's processes: SIGTERM to the API server, which stops the others, then SIGKILL.

        Args:
            grace_s: Time for an orderly end.
        """
        deadline = time.monotonic() + grace_s
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        while self._process.poll() is None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        # Without its API server, vLLM's engine may run on. The resource tracker ends after the others, and
        # then removes their shared memory.
        for number, spared in ((signal.SIGTERM, _TRACKER), (signal.SIGKILL, _TRACKER), _ALL):
            until = time.monotonic() + _FOLLOW_S
            while self._lives() and time.monotonic() < until:
                time.sleep(_POLL_S)
            self._signal_group(number, spared)
        self._lives()
        self._log.join(_FOLLOW_S)
        _remove_sockets(os.getpid())
        prune()

    def _signal_group(self, number: signal.Signals, spared: bytes | None) -> None:
        for entry in Path("/proc").iterdir():
            # Processes may end meanwhile.
            with contextlib.suppress(OSError):
                if not entry.name.isdigit() or os.getpgid(int(entry.name)) != self._process.pid:
                    continue
                if spared is None or spared not in (entry / "cmdline").read_bytes():
                    os.kill(int(entry.name), number)

    def _lives(self) -> bool:
        """Whether the group has a process; reaps those that have ended."""
        if self._process.poll() is None:
            return True
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-self._process.pid, os.WNOHANG)[0]:
                pass
            return True
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def _relay(self) -> None:
        """Copy vLLM's log to standard error, and keep its end."""
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                if _NOISE.match(line):
                    continue
                self._tail.append(line)
                # The disk may be full, or the terminal closed. vLLM must not block on a full pipe.
                with contextlib.suppress(OSError):
                    sys.stderr.buffer.write(line)
                    sys.stderr.buffer.flush()


def _socket_directory() -> Path | None:
    """Make a directory for vLLM's sockets, which a killed vLLM leaves behind; None: vLLM's own choice.

    Those of former processes that were killed are removed.
    """
    _remove_sockets(os.getpid())
    place = user_files.place()
    if place is None:
        return None
    path = place / f"{_SOCKETS}{os.getpid()}"
    # The address of a socket has at most 107 bytes, and vLLM's names have 36.
    if len(os.fsencode(path)) > 107 - 37:
        return None
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def _remove_sockets(own: int) -> None:
    for place in user_files.candidates():
        for path in place.glob(f"{_SOCKETS}*"):
            pid = path.name.removeprefix(_SOCKETS)
            if pid.isdigit() and (int(pid) == own or not started_at(int(pid))):
                shutil.rmtree(path, ignore_errors=True)
