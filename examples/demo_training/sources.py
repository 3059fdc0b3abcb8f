"""Sources of the text: Python's own library, and Debian packages with free text."""

from __future__ import annotations

import subprocess
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .plain_text import html_text, roff_text, sword_texts

__all__ = ["DOMAINS", "SOURCES", "Source", "SourceError", "read_source"]

DOMAINS = ("code", "prose", "german", "manual")
_DOWNLOAD_TIMEOUT_S = 300


class SourceError(RuntimeError):
    """A text is not available: the message names it and the remedy."""


@dataclass(frozen=True)
class Source:
    """One text.

    Attributes:
        domain: One of DOMAINS.
        name: Debian package, or `python` for the library of the running interpreter.
        licence: As the package's copyright file has it.
        kind: How its files are read: `python`, `roff`, `html` or `sword`.
        pattern: Which of the package's files.
    """

    domain: str
    name: str
    licence: str
    kind: str
    pattern: str


SOURCES = (
    Source("code", "python", "PSF-2.0", "python", "**/*.py"),
    Source("prose", "sword-text-web", "public domain", "sword", "**/engWEB2015eb/*.bzs"),
    Source("prose", "sword-text-kjv", "public domain", "sword", "**/engKJV2006eb/*.bzs"),
    Source("german", "manpages-de", "GPL-3+ and the pages' own", "roff", "**/man/de/man*/*.gz"),
    Source("german", "debian-reference-de", "GPL-2+", "html", "**/debian-reference/*.de.html"),
    Source("german", "installation-guide-amd64", "GPL-2", "html", "**/de/*.html"),
    Source("german", "developers-reference-de", "GPL-2", "html", "**/de/*.html"),
    Source("german", "debian-handbook", "CC-BY-SA-3.0 or GPL-2+", "html", "**/de-DE/*.html"),
    Source("manual", "manpages", "man-pages licences (verbatim, GPL, BSD)", "roff", "**/man*/*.gz"),
    Source(
        "manual", "manpages-dev", "man-pages licences (verbatim, GPL, BSD)", "roff", "**/man*/*.gz"
    ),
)


def read_source(source: Source, cache: Path) -> Iterator[tuple[str, str]]:
    """Name and text of each document.

    Raises:
        SourceError: A package is neither in the cache nor to be had, or has none of its files.
    """
    root = _python_library() if source.name == "python" else _unpacked(source.name, cache)
    paths = [p for p in sorted(root.glob(source.pattern)) if _wanted(p)]
    if not paths:
        raise SourceError(f"{source.name} has no files {source.pattern}: another release of it?")
    for path in paths:
        name = f"{source.name}/{path.relative_to(root)}"
        if source.kind == "sword":
            for number, text in enumerate(sword_texts(path)):
                yield f"{name}/{number}", text
        else:
            yield name, _READERS[source.kind](path)


def _read_python(path: Path) -> str:
    return path.read_text("utf-8", errors="replace").expandtabs(4)


_READERS = {"python": _read_python, "roff": roff_text, "html": html_text}


def _python_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _wanted(path: Path) -> bool:
    """Whether this is a file, not a link to one, and none of Python's tests."""
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    return path.is_file() and not path.is_symlink() and not left_out & set(path.parts)


def _unpacked(package: str, cache: Path) -> Path:
    """The package's files, from the cache or by apt-get."""
    target = cache / package
    if target.is_dir():
        return target
    downloads = cache / f".{package}"
    downloads.mkdir(parents=True, exist_ok=True)
    try:
        _call("apt-get", "download", package, cwd=downloads)
        (archive,) = downloads.glob("*.deb")
        _call("dpkg-deb", "-x", archive.name, "files", cwd=downloads)
        (downloads / "files").rename(target)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise SourceError(
            f"Debian's package {package} cannot be downloaded ({error}): run this on Debian 12 with "
            f"a network, or unpack the package into {target} yourself"
        ) from error
    return target


def _call(*command: str, cwd: Path) -> None:
    subprocess.run(
        command, cwd=cwd, check=True, capture_output=True, text=True, timeout=_DOWNLOAD_TIMEOUT_S
    )
