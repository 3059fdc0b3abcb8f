"""Plain text from the files of Debian's packages: manual pages, HTML, SWORD modules."""

from __future__ import annotations

import gzip
import html
import re
import shlex
import struct
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

__all__ = ["html_text", "roff_text", "sword_texts"]

_INDENT = " " * 7
_ESCAPES = [
    (r'\\".*$', ""),
    (r"\\f(\[[^\]]*\]|\(..|.)", ""),
    (r"\\[sm](\[[^\]]*\]|[-+]?\d)", ""),
    (r"\\\*(\[[^\]]*\]|\(..|.)", ""),
    (r"\\\((lq|rq|dq)|\\\[(lq|rq|dq)\]", '"'),
    (r"\\\((aq|oq|cq)|\\\[(aq|oq|cq)\]", "'"),
    (r"\\\((bu)|\\\[bu\]", "*"),
    (r"\\\((em|en|mi)|\\\[(em|en|mi)\]", "-"),
    (r"\\\(ti|\\\[ti\]", "~"),
    (r"\\\(ha|\\\[ha\]", "^"),
    (r"\\\((rs|bs)|\\\[(rs|bs)\]", "\x00"),
    (r"\\(\(..|\[[^\]]*\])", ""),
    (r"\\-", "-"),
    (r"\\[ ~0]", " "),
    (r"\\e", "\x00"),
    (r"\\[&/|^:,%c)]", ""),
    (r"\\", ""),
    ("\x00", r"\\"),
]
_ALTERNATING = {"BR", "RB", "BI", "IB", "IR", "RI"}
_BREAKS = {"PP", "P", "LP", "HP", "Pp", "TP", "TQ", "IP", "sp", "It", "RS", "RE", "EX", "nf"}
# mdoc names its words; man's and roff's other requests say how to print.
_MDOC_WORDS = {"Nm", "Nd", "Ar", "Fl", "Op", "Fn", "Fa", "Ft", "Fd", "Pa", "Xr", "Dv", "Er", "Va"}


def roff_text(path: Path) -> str:
    """A manual page without its markup: a heading, and the text below it by 7 columns."""
    lines: list[str] = []
    source = gzip.decompress(path.read_bytes()).decode("utf-8", errors="replace")
    for line in source.splitlines():
        if not line.startswith((".", "'")):
            lines.append(_INDENT + _unescape(line) if line.strip() else "")
            continue
        words = _words(line[1:].strip())
        if not words:
            continue
        request, words = words[0], words[1:]
        if request in ("TH", "Dt"):
            lines.append(f"{words[0]}({words[1]})" if len(words) > 1 else " ".join(words))
        elif request in ("SH", "Sh"):
            lines += ["", " ".join(words)]
        elif request in ("SS", "Ss"):
            lines += ["", "   " + " ".join(words)]
        elif request in ("B", "I", "SM", "SB", "UR", "MT") or request in _MDOC_WORDS:
            lines.append(_INDENT + " ".join(words))
        elif request in _ALTERNATING:
            lines.append(_INDENT + "".join(words))
        elif request in _BREAKS:
            lines.append("")
            if request in ("IP", "It") and words:
                lines.append(_INDENT + words[0])
    return _tidy(lines)


def _words(line: str) -> list[str]:
    """A request and its arguments, without escapes."""
    line = re.sub(r'\\".*$', "", line)
    lexer = shlex.shlex(line, posix=True, punctuation_chars=False)
    lexer.whitespace_split, lexer.quotes, lexer.escape, lexer.commenters = True, '"', "", ""
    try:
        words = list(lexer)
    except ValueError:  # an open quotation mark, which roff closes at the end of the line
        words = line.replace('"', "").split()
    return [_unescape(word) for word in words]


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    for pattern, replacement in _ESCAPES:
        text = re.sub(pattern, replacement, text)
    return text


class _Paragraphs(HTMLParser):
    """Collects the text of paragraphs, headings, items and listings."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._open = ""
        self._words: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in ("p", "h1", "h2", "h3", "h4", "pre"):
            self._finish()
            self._open = tag

    def handle_endtag(self, tag: str) -> None:
        if tag == self._open:
            self._finish()

    def handle_data(self, data: str) -> None:
        if self._open:
            self._words.append(data)

    def _finish(self) -> None:
        text = "".join(self._words)
        if self._open != "pre":
            text = " ".join(text.split())
        if text.strip():
            self.lines += [text, ""]
        self._open, self._words = "", []


def html_text(path: Path) -> str:
    """The paragraphs of a page, without its navigation."""
    parser = _Paragraphs()
    parser.feed(path.read_text("utf-8", errors="replace"))
    return _tidy(parser.lines)


def sword_texts(index: Path) -> Iterator[str]:
    """The books of a SWORD module, from `X.bzs` (offset, size, size unpacked) and `X.bzz`."""
    blocks = index.with_suffix(".bzz").read_bytes()
    for offset, size, _ in struct.iter_unpack("<III", index.read_bytes()):
        if size:
            xml = zlib.decompress(blocks[offset : offset + size]).decode("utf-8", errors="replace")
            xml = re.sub(r"(?s)<note.*?</note>|<title.*?</title>", "", xml)
            xml = re.sub(
                r"</verse>|<verse[^>]*eID[^>]*>|<l [^>]*/>|<lb[^>]*>|</?p\b[^>]*>", "\n", xml
            )
            yield _tidy(html.unescape(re.sub(r"<[^>]+>", "", xml)).splitlines())


def _tidy(lines: list[str]) -> str:
    """No white space at line ends, no two blank lines in a row, one line end at the end."""
    text = "\n".join(line.rstrip() for line in lines)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"
