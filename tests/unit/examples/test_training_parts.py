"""Training of the demo model: it learns, and its text sources are clean."""

import gzip
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from demo_training import corpus, training
from demo_training.corpus import Corpus
from demo_training.model import Sizes, build_model
from demo_training.plain_text import html_text, roff_text, sword_texts
from demo_training.sources import DOMAINS, Source, SourceError, read_source
from demo_training.training import Settings, train

VOCAB, STEPS = 300, 40


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_it_learns_for_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each domain counts through the vocabulary with its own step, which is easy to learn.
    ids = {d: (np.arange(3000) * (i + 1) % VOCAB).astype(np.uint16) for i, d in enumerate(DOMAINS)}
    corpus = Corpus(train=ids, held_out=ids, bytes_read=dict.fromkeys(DOMAINS, 0))
    torch.manual_seed(1)
    sizes = Sizes(layers=2, hidden=64, experts=8, top_k=2, width=32)
    model = build_model(VOCAB, 64, 0, torch.device("cpu"), sizes)
    seconds = iter(range(STEPS + 1))
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    seen: list[float] = []
    settings = Settings(STEPS / 60, tokens=256, length=16, long_length=16)
    result = train(model, corpus, settings, lambda progress: seen.append(progress.loss))
    assert (result.step, result.tokens, result.worked_s) == (STEPS, STEPS * 256, STEPS)
    # What is reported is the mean over all steps so far.
    last = STEPS * seen[-1] - (STEPS - 1) * seen[-2]
    assert last < seen[0] - 0.3


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


def test_the_tokens_are_the_text_and_held_out_text_is_not_trained_on(tmp_path, monkeypatch) -> None:
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
