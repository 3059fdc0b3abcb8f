"""Text sources: markup is removed, held-out text is not trained on, a missing source is named."""

from __future__ import annotations

import gzip
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from demo_training import corpus
from demo_training.plain_text import html_text, roff_text, sword_texts
from demo_training.sources import DOMAINS, Source, SourceError, read_source

PAGE = r""".\" a comment
.TH FROB 2 2022-10-30 "Linux man-pages"
.SH NAME
frob \- turn a file
.SH SYNOPSIS
.nf
.BI "int frob(int " fd ", const char *" path );
.fi
.SH DESCRIPTION
The call
.BR frob ()
doesn\(aqt return until \fIpath\fP is \f[B]open\f[].
.PP
It costs "\e\e" and \-1.
"""


def test_a_manual_page(tmp_path: Path) -> None:
    path = tmp_path / "frob.2.gz"
    path.write_bytes(gzip.compress(PAGE.encode()))
    assert roff_text(path).splitlines() == [
        "FROB(2)",
        "",
        "NAME",
        "       frob - turn a file",
        "",
        "SYNOPSIS",
        "",
        "       int frob(int fd, const char *path);",
        "",
        "DESCRIPTION",
        "       The call",
        "       frob()",
        "       doesn't return until path is open.",
        "",
        r'       It costs "\\" and -1.',
    ]


def test_a_page_of_html(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(
        "<html><head><title>no</title><style>p {}</style></head><body><a>Next</a><h1>Größe &amp; Maß</h1>"
        "<p>Eine <b>fette</b>\n Zeile.</p><pre>a\n  b</pre></body></html>"
    )
    assert html_text(path) == "Größe & Maß\n\nEine fette Zeile.\n\na\n  b\n"


def test_a_sword_module(tmp_path: Path) -> None:
    books = [
        b"<verse osisID='a'>In the <w lemma='x'>beginning</w></verse><note>n</note>",
        b"Two &amp; three",
    ]
    packed = [zlib.compress(book) for book in books]
    index = tmp_path / "ot.bzs"
    entries = [(0, len(packed[0]), len(books[0])), (0, 0, 0), (len(packed[0]), len(packed[1]), 9)]
    index.write_bytes(b"".join(struct.pack("<III", *entry) for entry in entries))
    (tmp_path / "ot.bzz").write_bytes(b"".join(packed))
    assert list(sword_texts(index)) == ["In the beginning\n", "Two & three\n"]


def test_no_package_and_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SourceError, match=r"package manpages cannot be downloaded .* unpack"):
        list(read_source(Source("manual", "manpages", "free", "roff", "**/*.gz"), tmp_path))


def test_the_tokens_are_the_text_and_held_out_text_is_not_trained_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each domain is one file of numbered lines, so that every line can be identified."""
    made = []
    for domain in DOMAINS:
        package = tmp_path / domain
        package.mkdir()
        lines = "".join(f"line {i} of the {domain}, ä\n" for i in range(4_000))
        (package / "text.py").write_text(lines)
        made.append(Source(domain, domain, "free", "python", "**/*.py"))
    monkeypatch.setattr(corpus, "SOURCES", tuple(made))
    monkeypatch.setattr(corpus, "_PART_BYTES", 400)
    tokenizer, found = corpus.build_corpus(tmp_path, 400, 1)
    end = tokenizer.convert_tokens_to_ids(corpus.END)
    for domain in DOMAINS:
        parts: dict[str, set[str]] = {}
        for split, ids in (("train", found.train[domain]), ("held_out", found.held_out[domain])):
            assert ids[-1] == end
            parts[split] = set(tokenizer.decode(ids[ids != end].tolist()).splitlines())
        assert not parts["train"] & parts["held_out"]
        assert parts["train"] | parts["held_out"] == {
            f"line {i} of the {domain}, ä" for i in range(4_000)
        }
        assert 0 < len(parts["held_out"]) < 0.1 * len(parts["train"])
    again, same = corpus.build_corpus(tmp_path, 400, 1)
    assert again.get_vocab() == tokenizer.get_vocab()
    np.testing.assert_array_equal(same.train["code"], found.train["code"])
