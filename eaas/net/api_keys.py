"""API keys of the HTTP endpoint (`Authorization: Bearer KEY`).

Keys come from a file with one key per line (blank lines and lines that begin with # are ignored), or from the
environment; never from the command line, which all users of the machine can read.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import threading
from collections.abc import Iterable
from pathlib import Path

from eaas.config.environment import KEY_VARIABLE
from eaas.errors import ConfigError
from eaas.log import get_logger

__all__ = ["ApiKeys", "authorization"]

_log = get_logger(__name__)

_MOST_BYTES = 1 << 20
_BEARER = re.compile(rb"bearer +(\S+)", re.IGNORECASE)
# RFC 6750 allows a subset of this.
_KEY = re.compile(r"[!-~]+")


class ApiKeys:
    """API keys that admit a request to the HTTP endpoint. Thread-safe.

    Args:
        file: File of keys, read again when it changes. None uses the environment's key.

    Raises:
        ConfigError: There is no key, the file is unreadable or readable by all users, or a key is not
            printable ASCII without blanks.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._lock = threading.Lock()
        self._stamp = self._look()
        self._digests = _digests(_keys(file))

    @classmethod
    def of(cls, file: str) -> ApiKeys | None:
        """Load the configured API keys; None if neither a file nor the environment has one."""
        if not file and KEY_VARIABLE not in os.environ:
            return None
        return cls(Path(file) if file else None)

    def allow(self, header: bytes) -> bool:
        """Whether a request's Authorization header presents one of the API keys; if not, it is refused."""
        found = _BEARER.fullmatch(header)
        if found is None:
            return False
        shown = hashlib.sha256(found[1]).digest()
        # A list instead of a generator, so that all keys are compared and the time is constant.
        return any([hmac.compare_digest(shown, known) for known in self._now()])

    def _now(self) -> tuple[bytes, ...]:
        with self._lock:
            stamp = self._look()
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._digests = _digests(_keys(self._file))
                    _log.info("read new keys from %s", self._file)
                except ConfigError as error:
                    _log.warning("keeping the old keys: %s", error)
            return self._digests

    def _look(self) -> tuple[int, ...]:
        try:
            status = self._file.stat() if self._file else None
        except OSError:
            return (-1,)
        return (status.st_ino, status.st_mtime_ns, status.st_size) if status else ()


def authorization(file: Path | None = None) -> dict[str, str]:
    """The Authorization header that commands send: the file's first key, else the environment's, else none.

    Raises:
        ConfigError: See `ApiKeys`.
    """
    if file is None and KEY_VARIABLE not in os.environ:
        return {}
    return {"Authorization": f"Bearer {_keys(file)[0]}"}


def _keys(file: Path | None) -> list[str]:
    if file is None:
        keys, source = [os.environ[KEY_VARIABLE].strip()], KEY_VARIABLE
    else:
        keys, source = _lines(file), str(file)
    if not any(keys):
        raise ConfigError(f"{source}: no key in it; give one, or leave {source} out")
    if not all(map(_KEY.fullmatch, keys)):
        raise ConfigError(f"{source}: a key has to be printable ASCII without blanks")
    return keys


def _lines(file: Path) -> list[str]:
    try:
        with file.open("rb") as opened:
            if os.fstat(opened.fileno()).st_mode & 0o004:
                raise ConfigError(f"{file}: all users may read these keys; chmod 600 it")
            text = opened.read(_MOST_BYTES).decode("ascii", "replace")
    except OSError as error:
        raise ConfigError(
            f"{file}: {error.strerror}; give a file with a key on each line"
        ) from error
    lines = (line.strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith("#")]


def _digests(keys: Iterable[str]) -> tuple[bytes, ...]:
    return tuple(hashlib.sha256(key.encode()).digest() for key in keys)
