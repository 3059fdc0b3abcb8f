"""Reads the small text files of a checkpoint, and says in one line why one cannot be read.

Everything here is read by transformers, too, so a file that only a lenient reader accepts is refused.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Mapping
from typing import Any

from eaas.checkpoint.source import Source
from eaas.errors import CheckpointError

__all__ = [
    "LFS_POINTER",
    "REPAIR",
    "check_kinds",
    "lfs_pointer",
    "read_object",
    "read_optional",
    "read_text",
]

REPAIR = "repair it, or download it again"
"""Remedy for a file that is broken, by a person or on its way here."""

LFS_POINTER = b"version https://git-lfs"
"""Beginning of the text that Git LFS leaves in place of a large file."""

_MAX_BYTES = 100_000_000
_MARKS = {
    codecs.BOM_UTF8: "the byte order mark of UTF-8",
    codecs.BOM_UTF16_LE: "the byte order mark of UTF-16",
    codecs.BOM_UTF16_BE: "the byte order mark of UTF-16",
}
_SHOWN = 24  # characters
# Begins an escaped half of a pair, which JSON allows alone and UTF-8 does not.
_SURROGATE = "\\ud"
_KINDS = {
    dict: "an object",
    list: "a list",
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
}


def lfs_pointer(place: str) -> CheckpointError:
    """Make the error for a file of which a clone has only Git LFS's pointer."""
    return CheckpointError(
        f"{place} is a pointer of Git LFS, not the file: run `git lfs pull` in its directory"
    )


def read_text(
    source: Source, name: str, error: type[CheckpointError] = CheckpointError
) -> str | None:
    """Read a file of UTF-8.

    Args:
        source: Where the checkpoint's files are.
        name: Name of the file.
        error: Class of the error.

    Returns:
        Its text; None if there is none of that name.

    Raises:
        CheckpointError: It is too large, empty, a pointer of Git LFS, or not UTF-8.
        OSError: It cannot be read.
    """
    size, place = source.size(name), source.place(name)
    if size is None:
        return None
    if size > _MAX_BYTES:
        raise error(f"{place} has {size} bytes, more than {_MAX_BYTES}: download it again")
    if not size:
        raise error(f"{place} is empty: download it again")
    data = bytearray(size)
    try:
        source.read(name, 0, memoryview(data))
    except ValueError as cause:
        raise error(f"{place}: {cause}: download it again") from cause
    if data.startswith(LFS_POINTER):
        raise lfs_pointer(place)
    for mark, words in _MARKS.items():
        if data.startswith(mark):
            raise error(f"{place} begins with {words}: save it as UTF-8 without a mark")
    if 0 in data[:2]:
        raise error(f"{place} begins with bytes of UTF-16: save it as UTF-8")
    try:
        return data.decode()
    except UnicodeDecodeError as cause:
        if cause.end == size:
            raise error(f"{place} ends inside a character: download it again") from cause
        raise error(f"{place} is not UTF-8 (byte {cause.start}): save it as UTF-8") from cause


def read_object(
    source: Source, name: str, error: type[CheckpointError] = CheckpointError
) -> dict[str, Any] | None:
    """Read a file with a JSON object; None if there is none of that name. Raises as `read_text`."""
    text = read_text(source, name, error)
    return None if text is None else _object(source.place(name), text, error)


def read_optional(source: Source, name: str) -> dict[str, Any]:
    """Read a file as `read_object`; empty also if the file holds null."""
    text = read_text(source, name)
    if text is None or text.strip() == "null":
        return {}
    return _object(source.place(name), text, CheckpointError)


def _object(place: str, text: str, error: type[CheckpointError]) -> dict[str, Any]:
    try:
        document = json.loads(text)
        if _SURROGATE in text.lower():
            json.dumps(document, ensure_ascii=False).encode()
    except UnicodeEncodeError as cause:
        half = ascii(cause.object[cause.start])
        raise error(f"{place} has {half}, half of a character: {REPAIR}") from cause
    except (ValueError, RecursionError) as cause:
        raise error(f"{place} is not JSON ({_why(text, cause)}): {REPAIR}") from cause
    if not isinstance(document, dict):
        raise error(f"{place} holds {_KINDS[type(document)]} instead of an object: {REPAIR}")
    return document


def check_kinds(
    place: str, document: Mapping[str, Any], kinds: Mapping[str, tuple[type, ...]]
) -> None:
    """Check the kinds of a JSON object's fields. `float` allows whole numbers, and what is finite.

    Raises CheckpointError: a field has another kind.
    """
    for name, allowed in kinds.items():
        value = document.get(name)
        if name not in document or (float in allowed and type(value) is int):
            continue
        if type(value) in allowed and (type(value) is not float or math.isfinite(value)):
            continue
        wanted = " or ".join(_KINDS[kind] for kind in allowed)
        shown = json.dumps(value)[:_SHOWN]
        raise CheckpointError(f"{place}: {name} is {shown}, not {wanted}: {REPAIR}")


def _why(text: str, cause: Exception) -> str:
    if isinstance(cause, json.JSONDecodeError) and not text[: cause.pos].strip():
        # As a web page that was saved in its place.
        return f"line {cause.lineno} column {cause.colno}: it begins with {text.strip()[:_SHOWN]!r}"
    return str(cause)
