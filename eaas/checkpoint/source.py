"""The interface to a checkpoint's bytes: a local directory, a URL, or the cluster's other expert servers."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar
from urllib.parse import unquote, urlsplit

from eaas.errors import NotACheckpointError
from eaas.hub_cache import find_checkpoint

if TYPE_CHECKING:
    from eaas.checkpoint.header import ShardHeader
    from eaas.checkpoint.shard import Shard

__all__ = [
    "CONFIG",
    "INDEX",
    "NO_GGUF",
    "SINGLE",
    "Source",
    "is_local",
    "is_url",
    "local_directory",
    "shown",
]

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
NO_GGUF = (
    "only safetensors are read: give the model from which it was converted (hf download ORG/NAME)"
)
"""Remedy for a file that llama.cpp reads."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_ON_THE_HUB = re.compile(r"(?:hf://|https://(?:huggingface|hf)\.co/)(\w[\w.-]*/\w[\w.-]*)")
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class Source(Protocol):
    """Where a checkpoint's files are, and how to read ranges of them. Thread-safe.

    `str(source)` names it in messages, without credentials.

    Attributes:
        is_remote: Whether reads wait for a network.
        digest: `ModelShape.digest`, if a peer has computed it; else empty.
    """

    is_remote: bool
    digest: str

    def place(self, name: str) -> str:
        """Name a file in messages, without credentials."""

    def size(self, name: str) -> int | None:
        """Size of a file in bytes; None if there is none of that name. Raises OSError or CheckpointError."""

    def names(self) -> list[str]:
        """Sorted names of the files, for messages; empty if the source cannot list them."""

    def read(self, name: str, offset: int, buffer: memoryview) -> None:
        """Fill a buffer from an offset of a file.

        Raises OSError, CheckpointError, or ValueError if the file ends before.
        """

    def each(self, work: Callable[[_Item], _Result], items: Iterable[_Item]) -> Iterator[_Result]:
        """Like `map`, but several at a time if reads wait for a network."""

    def open_shard(self, name: str, header: ShardHeader) -> Shard:
        """Open a shard with a known header. Raises OSError, ValueError (changed) or CheckpointError."""

    def others(self) -> Iterable[object]:
        """Iterate over the sources of the same bytes; until the next step, reads ask this one first."""

    def close(self) -> None:
        """Release connections and cancel reads, when the process ends."""


def is_url(text: str) -> bool:
    """Whether a text is a URL rather than a path."""
    return _URL.match(text) is not None


def is_local(text: str) -> bool:
    """Whether a text names a local checkpoint: it is no URL, or one of a file."""
    return not is_url(text) or text.lower().startswith("file:")


def shown(url: str) -> str:
    """Return a URL for messages: without user, password, query and fragment, which may hold credentials."""
    scheme, _, rest = url.partition("://")
    host, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}".rstrip("/")


def local_directory(text: str | os.PathLike[str]) -> Path:
    """Return the directory that a path, a file:// URL, or a name in the cache of huggingface_hub names.

    Raises:
        NotACheckpointError: It is empty or another URL, or no single snapshot has that name
            (`find_checkpoint`).
        CheckpointError: The cache cannot be read.
    """
    text = os.fspath(text)
    if not text:
        # `Path("")` is the current directory.
        raise NotACheckpointError("the model is empty: give the directory of a checkpoint")
    if not is_url(text):
        return find_checkpoint(text)
    parts = urlsplit(text)
    if parts.scheme.lower() == "file" and parts.netloc in ("", "localhost"):
        return find_checkpoint(unquote(parts.path))
    name = _ON_THE_HUB.match(text)
    remedy = f": `hf download {name[1]}`, and give {name[1]}" if name else ""
    raise NotACheckpointError(
        f"{shown(text)}: the attention client reads a local directory; only `eaas expert-server` "
        f"reads a URL{remedy}"
    )
