"""A checkpoint behind a URL (S3, Google Storage, HTTP, ...): fsspec reads ranges of its files."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit, urlunsplit

import fsspec
from fsspec.asyn import sync

from eaas.checkpoint.header import ShardHeader
from eaas.checkpoint.pieces import pieces
from eaas.checkpoint.shard import Shard
from eaas.checkpoint.source import shown
from eaas.errors import CheckpointError, CorruptShardError, MissingShardError, NotACheckpointError
from eaas.log import get_logger
from eaas.net.grpc_client import Backoff
from eaas.net.loopback import is_loopback
from expert_server.weights.background import step_back
from expert_server.weights.remote_shard import RemoteShard

__all__ = ["UrlSource"]

_log = get_logger(__name__)
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

# Limit of one request; with _READERS of them, the latency of an object store is hidden.
_REQUEST_BYTES = 8 << 20
_READERS = 8
_DEADLINE_S = 30.0
_ATTEMPTS = 5
_HTTP = ("http", "https")
_GONE = (404, 410)
_REFUSED = (401, 403)
# Answers that a later attempt may change; other 4xx are final.
_PASSING = (408, 425, 429)
# What file systems tell about a file that changes with its content, in lower case.
_IDENTITY = frozenset(
    (
        *("size", "mtime", "ino", "created", "modified"),
        *("etag", "last-modified", "content-md5", "digest"),  # HTTP
        *("lastmodified", "versionid"),  # S3
        *("updated", "generation", "md5hash", "crc32c"),  # Google Storage
        *("last_modified", "blob_id"),  # Azure, Hugging Face
    )
)
_URLS = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s'\"]+")


class _MissingError(Exception):
    """There is no file of that name."""


class _RefusedError(Exception):
    """The store refuses access to a file; the text says what to do."""


class _FinalError(Exception):
    """A failure that another attempt would repeat; the text says why and what to do."""


@dataclass
class _Object:
    """What is known of a file: its identity when its size was asked for, and the latest check of that."""

    size: int
    identity: Mapping[str, str]
    checked_at: float = 0.0
    checking: threading.Lock = field(default_factory=threading.Lock)


class UrlSource:
    """A checkpoint behind a URL, as a `Source`. Reads ranges only, and keeps nothing on disk.

    Every read is bounded in size and time, and is tried several times. After a read, the file must still be
    the one whose header was read: its size and what else the file system tells (ETag, time) are compared.

    Args:
        url: The directory of the checkpoint; its scheme names a file system of fsspec.
        deadline_s: Limit of one attempt.

    Raises:
        NotACheckpointError: There is no such file system, or its package is not installed.
    """

    is_remote = True
    digest = ""

    def __init__(self, url: str, deadline_s: float = _DEADLINE_S) -> None:
        self._shown = shown(url)
        self._scheme = url.partition("://")[0].lower()
        # Texts of errors may repeat what the URL holds.
        self._has_secrets = shown(url) != url.rstrip("/")
        self._deadline_s = deadline_s
        self._fs, self._root = _file_system(url)
        if self._fs.async_impl:
            # Serving precedes its work.
            self._fs.loop.call_soon_threadsafe(step_back)
        self._pool = ThreadPoolExecutor(_READERS, "url", step_back)
        self._closed = threading.Event()
        self._objects: dict[str, _Object] = {}

    def __str__(self) -> str:
        return self._shown

    def close(self) -> None:
        """Cancel reads that have not begun, and the next attempts of others."""
        self._closed.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def place(self, name: str) -> str:
        """URL of a file, without credentials."""
        return f"{self._shown}/{name}"

    def size(self, name: str) -> int | None:
        """Size of a file in bytes; None if there is none of that name. Raises CheckpointError."""
        try:
            found = self._attempt(name, "", partial(self._info, name))
        except _MissingError:
            return None
        except _RefusedError as error:
            # So answers a store that does not let this user list files, for a file that does not exist.
            if self._objects:
                return None
            raise CheckpointError(str(error)) from None
        self._objects[name] = _Object(int(found["size"]), found)
        return self._objects[name].size

    def names(self) -> list[str]:
        """None: HTTP has no lists of files, and others cost a permission."""
        return []

    def read(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from an offset of a file whose size was asked for.

        Raises:
            MissingShardError: The file is gone.
            CorruptShardError: It has changed since its size was asked for, or ends before.
            CheckpointError: It cannot be read, also after several attempts.
        """
        for begin, end in pieces(len(buffer), _REQUEST_BYTES):
            first, last = offset + begin, offset + end
            what = f" (bytes {first} to {last})"
            try:
                data = self._attempt(name, what, partial(self._get, name, first, last))
                self._confirm(name)
            except _MissingError:
                raise MissingShardError(
                    f"{self.place(name)} is missing: restore it, and start this server again"
                ) from None
            except _RefusedError as error:
                raise CheckpointError(str(error)) from None
            buffer[begin:end] = data

    def start(self, work: Callable[..., None], *arguments: object) -> Future[None]:
        """Run a function in one of the threads that read."""
        return self._pool.submit(work, *arguments)

    def each(self, work: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
        """Like `map`, several at a time."""
        return self._pool.map(work, items)

    def open_shard(self, name: str, header: ShardHeader) -> Shard:
        """Return a shard with a known header; reads check that it has not changed."""
        return RemoteShard(name, self.place(name), header, self, _REQUEST_BYTES)

    def others(self) -> Iterable[object]:
        """None: there is only this copy."""
        return ()

    # -- one file ---------------------------------------------------------------------------------

    def _confirm(self, name: str) -> None:
        """Check that a file is the same as when its size was asked for, at a time after this call.

        One check serves all reads that ended before it.
        """
        ended = time.monotonic()
        known = self._objects[name]
        with known.checking:
            if known.checked_at > ended:
                return
            begun = time.monotonic()
            if self._attempt(name, "", partial(self._info, name)) != known.identity:
                raise CorruptShardError(
                    f"{self.place(name)} has changed since its header was read: start this server again "
                    "when the upload is complete"
                )
            known.checked_at = begun

    def _info(self, name: str) -> dict[str, str]:
        """Size and identity of a file."""
        path = self._path(name)
        if self._fs.async_impl:
            info = sync(self._fs.loop, self._fs._info, path, timeout=self._deadline_s)
        else:
            info = _within(self._deadline_s, lambda: self._fs.info(path))
        if info.get("type") == "directory":
            raise _MissingError
        if not isinstance(info.get("size"), int):
            raise _FinalError(
                "its server does not tell its size: use one that sends Content-Length and answers "
                "range requests"
            )
        return {key.lower(): str(value) for key, value in info.items() if key.lower() in _IDENTITY}

    def _get(self, name: str, begin: int, end: int) -> bytes:
        """Read a range of a file, exactly."""
        path, fs = self._path(name), self._fs
        if self._scheme in _HTTP:
            # Unlike fsspec's `cat_file`, this never takes a whole file from a server that ignores ranges.
            headers = fs.kwargs.get("headers", {}) | {"Accept-Encoding": "identity"}
            size = self._objects[name].size
            file = fs.open(path, "rb", size=size, cache_type="none", headers=headers)
            try:
                data = sync(fs.loop, file.async_fetch_range, begin, end, timeout=self._deadline_s)
            except ValueError:
                raise _FinalError(
                    "its server does not answer range requests: use one that does"
                ) from None
        elif fs.async_impl:
            data = sync(fs.loop, fs._cat_file, path, start=begin, end=end, timeout=self._deadline_s)
        else:
            # Else most of them read megabytes ahead.
            exact = partial(fs.cat_file, path, start=begin, end=end, cache_type="none")
            data = _within(self._deadline_s, exact)
        if len(data) != end - begin:
            raise EOFError(f"{len(data)} bytes instead of {end - begin}")
        return bytes(data)

    def _path(self, name: str) -> str:
        if self._scheme not in _HTTP:
            return f"{self._root}/{name}"
        # A query (a signature) stays behind the path.
        parts = urlsplit(self._root)
        return urlunsplit(parts._replace(path=f"{parts.path.rstrip('/')}/{quote(name)}"))

    # -- attempts ---------------------------------------------------------------------------------

    def _attempt(self, name: str, what: str, call: Callable[[], _Result]) -> _Result:
        """Call until it succeeds, with pauses.

        Raises:
            _MissingError: There is no such file.
            CorruptShardError: The file ends early, at each attempt.
            _RefusedError: The store refuses access.
            CheckpointError: Each attempt failed, or the first one for good.
        """
        place = f"{self.place(name)}{what}"
        backoff = Backoff(first_s=0.2, last_s=5.0)
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return call()
            except (_MissingError, CheckpointError):
                raise
            except _FinalError as error:
                raise CheckpointError(f"{place} cannot be read: {error}") from None
            except Exception as error:  # noqa: BLE001 (file systems raise their own; typed and raised below)
                status = _status(error)
                if _is_missing(error, status):
                    raise _MissingError from None
                why = self._reason(error, status)
                is_short = isinstance(error, EOFError)
                if isinstance(error, PermissionError) or status in _REFUSED:
                    raise _RefusedError(
                        f"{place} cannot be read ({why}): check the URL, and give credentials by the "
                        f"environment variables of fsspec's {self._scheme}://"
                    ) from None
                if status is not None and 400 <= status < 500 and status not in _PASSING:
                    raise CheckpointError(
                        f"{place} cannot be read ({why}): check the URL"
                    ) from None
            if attempt < _ATTEMPTS:
                _log.info("%s: attempt %d failed: %s", place, attempt, why)
                if self._closed.wait(backoff.next_s()):
                    break
        if is_short:
            raise CorruptShardError(f"{place} is truncated ({why}): upload the file again")
        raise CheckpointError(
            f"{place} cannot be read, also at the last of {attempt} attempts ({why}): check the store and "
            "the network, and start this server again"
        )

    def _reason(self, error: Exception, status: int | None) -> str:
        """Say in a few words what failed, without credentials."""
        if isinstance(error, TimeoutError):
            return f"no answer within {self._deadline_s:g} s"
        if status is not None:
            return f"status {status}"
        name = type(error).__name__
        text = _URLS.sub(lambda found: shown(found[0]), " ".join(str(error).split()))
        return name if self._has_secrets or not text else f"{name}: {text[:200]}"


def _file_system(url: str) -> tuple[Any, str]:
    """Make fsspec's file system for a URL, and the path of the URL in it.

    Not by `fsspec.core.url_to_fs`, which takes `::` (also of an IPv6 address) for a chain of file systems,
    such as one that copies files to the disk.
    """
    place, scheme = shown(url), url.partition("://")[0].lower()
    try:
        kind: Any = fsspec.get_filesystem_class(scheme)
        options = kind._get_kwargs_from_urls(url)
        if scheme in _HTTP:
            options["client_kwargs"] = {"trust_env": not is_loopback(url)}
        return kind(**options, skip_instance_cache=True), str(kind._strip_protocol(url)).rstrip("/")
    except ImportError as error:
        package = (getattr(error.__cause__, "name", None) or "its package").partition(".")[0]
        raise NotACheckpointError(
            f"{place}: {scheme}:// needs {package}: pip install {package}"
        ) from None
    except Exception as error:  # noqa: BLE001 (file systems raise their own)
        why = "" if shown(url) != url.rstrip("/") else f" ({type(error).__name__}: {error})"
        raise NotACheckpointError(
            f"{place}: fsspec cannot open {scheme}://{why}: give a directory, or a URL of one of "
            "fsspec's file systems (s3://, gs://, https://, ...)"
        ) from None


def _within(deadline_s: float, call: Callable[[], _Result]) -> _Result:
    """Run a blocking call in a thread of its own. Raises TimeoutError past the deadline; the thread stays."""
    done: Future[_Result] = Future()

    def run() -> None:
        step_back()
        # The result may come after the deadline.
        with contextlib.suppress(Exception):
            try:
                done.set_result(call())
            except Exception as error:  # noqa: BLE001 (raised in the caller)
                done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result(deadline_s)


def _status(error: Exception) -> int | None:
    """HTTP status of an error or of its cause, if it has one."""
    for each in (error, error.__cause__):
        status = getattr(each, "status", None)
        if isinstance(status, int) and status >= 400:
            return status
    return None


def _is_missing(error: Exception, status: int | None) -> bool:
    """Return whether an error means a missing file.

    fsspec's HTTP raises FileNotFoundError for all failures of a HEAD request, with the failure as its cause.
    """
    if status is not None:
        return status in _GONE
    is_http = type(error.__cause__).__module__.partition(".")[0] == "aiohttp"
    return isinstance(error, FileNotFoundError) and not is_http
