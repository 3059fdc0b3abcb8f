"""Small JSON files that only this user's processes on this machine can read and write.

Files are written to the first of these directories that is private to the user (mode 0700, no symbolic link).
All of them are searched, because shells may differ in `XDG_RUNTIME_DIR`:

    $XDG_RUNTIME_DIR/eaas
    /run/user/UID/eaas
    /tmp/eaas-UID                 (not TMPDIR, which may differ between shells)
    $XDG_STATE_HOME/eaas          (~/.local/state/eaas), if another user has the name in /tmp
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import itertools
import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from eaas.errors import ConfigError

__all__ = ["candidates", "change", "place", "read", "read_all", "remove", "write"]

_SUFFIX = ".json"
_MOST_BYTES = 64 << 10
_LOCK_S = 2.0
_LOCK_POLL_S = 0.005
_numbers = itertools.count()


def candidates() -> tuple[Path, ...]:
    """List the directories in which the files may be, best first."""
    variables = (os.environ.get(name, "") for name in ("XDG_RUNTIME_DIR", "XDG_STATE_HOME", "HOME"))
    return _candidates(os.geteuid(), *variables)


@functools.lru_cache(1)
def _candidates(user: int, runtime: str, state: str, home: str) -> tuple[Path, ...]:
    state = state or f"{home}/.local/state"
    found = [Path(runtime) / "eaas"] if os.path.isabs(runtime) else []
    found += [Path(f"/run/user/{user}/eaas"), Path(f"/tmp/eaas-{user}")]
    found += [Path(state) / "eaas"] if os.path.isabs(state) else []
    return tuple(dict.fromkeys(found))


def place() -> Path | None:
    """Return the directory for new files, to name it in a message; None if none is usable."""
    with contextlib.suppress(ConfigError), _writable() as (path, _):
        return path
    return None


def read(name: str) -> Iterator[dict[str, Any]]:
    """Read the JSON documents of a name, best directory first; skip files that others could have written."""
    for fd in _directories():
        document = _read(fd, name)
        if document is not None:
            yield document


def read_all() -> dict[str, dict[str, Any]]:
    """Read all JSON documents of this user (records of servers and running clusters), by name."""
    found: dict[str, dict[str, Any]] = {}
    for fd in _directories():
        found = dict(_list(fd)) | found
    return found


def write(name: str, document: dict[str, Any]) -> None:
    """Write or replace a JSON document atomically.

    Raises:
        ConfigError: No directory of `candidates` is usable.
    """
    with _writable() as (_, fd):
        _write(fd, name, document)
        # An older document in another directory must not hide this one.
        for other in _directories():
            if not os.path.sameopenfile(fd, other):
                _remove(other, name)


def remove(name: str) -> None:
    """Remove the JSON documents of a name, if there are any."""
    for fd in _directories():
        _remove(fd, name)


@contextlib.contextmanager
def change() -> Iterator[None]:
    """Lock the user's files (server records) inside the block; after 2 s continue without the lock.

    Raises:
        ConfigError: No directory of `candidates` is usable.
    """
    with _writable() as (_, fd):
        deadline = time.monotonic() + _LOCK_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    break
                time.sleep(_LOCK_POLL_S)
        # Closing the descriptor releases the lock.
        yield


# -- directories ------------------------------------------------------------------------------------------


def _open(path: Path) -> int | None:
    """Open a directory of the user's files; None if it is missing or not private to this user."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    status = os.fstat(fd)
    if status.st_uid == os.geteuid() and not status.st_mode & 0o077:
        return fd
    os.close(fd)
    return None


def _directories() -> Iterator[int]:
    for path in candidates():
        fd = _open(path)
        if fd is not None:
            try:
                yield fd
            finally:
                os.close(fd)


@contextlib.contextmanager
def _writable() -> Iterator[tuple[Path, int]]:
    places = candidates()
    for path in places:
        with contextlib.suppress(OSError):
            if path == places[-1]:
                path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700)
        fd = _open(path)
        if fd is None or not os.access(path, os.W_OK):
            if fd is not None:
                os.close(fd)
            continue
        try:
            yield path, fd
        finally:
            os.close(fd)
        return
    raise ConfigError(
        f"no directory for the cluster's secret: none of {', '.join(map(str, places))} can be created or is "
        "private to this user (mode 0700); set XDG_RUNTIME_DIR to such a directory"
    )


# -- files ------------------------------------------------------------------------------------------------


def _list(fd: int) -> Iterator[tuple[str, dict[str, Any]]]:
    for entry in os.listdir(fd):
        name = entry.removesuffix(_SUFFIX)
        if name != entry and (document := _read(fd, name)) is not None:
            yield name, document


def _read(directory: int, name: str) -> dict[str, Any] | None:
    try:
        # O_NONBLOCK, because a pipe of that name may have no writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        fd = os.open(name + _SUFFIX, flags, dir_fd=directory)
    except OSError:
        return None
    try:
        status = os.fstat(fd)
        own = status.st_uid == os.geteuid() and not status.st_mode & 0o077
        if not own or not stat.S_ISREG(status.st_mode):
            return None
        document = json.loads(os.read(fd, _MOST_BYTES))
    except ValueError:
        return None
    finally:
        os.close(fd)
    return document if isinstance(document, dict) else None


def _write(directory: int, name: str, document: dict[str, Any]) -> None:
    unfinished = f".{name}.{os.getpid()}.{next(_numbers)}"
    fd = os.open(
        unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=directory
    )
    try:
        with os.fdopen(fd, "w") as file:
            json.dump(document, file)
        os.rename(unfinished, name + _SUFFIX, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        os.unlink(unfinished, dir_fd=directory)
        raise


def _remove(directory: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name + _SUFFIX, dir_fd=directory)
