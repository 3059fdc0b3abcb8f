"""Log lines that strangers can cause do not fill the disk."""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Iterator

import pytest

from eaas.log import configure_logging, one_line


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """What a role logs."""
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    configure_logging("monitor")
    yield out
    root.handlers[:] = handlers
    root.setLevel(level)


def test_the_words_of_a_library_in_one_line() -> None:
    assert one_line(ValueError("a\n  b")) == "a b"
    assert one_line(ValueError()) == "ValueError"
    assert one_line(KeyError("silly")) == "KeyError: 'silly'"
    long = one_line(ValueError("word " * 200))
    assert long.endswith("word ...")
    assert len(long) <= 300


def test_one_statement_cannot_flood_the_log(
    written: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    log = logging.getLogger("x")
    for later in (0.0, 61.0):
        now_s += later
        for i in range(2_000):
            log.warning("bad request from %d", i)
            if i % 10 == 0:
                try:
                    raise ValueError("a" * i)
                except ValueError:
                    log.exception("it failed for %d", i)
        log.info("something else")
    lines = written.getvalue().splitlines()
    assert sum("bad request" in line for line in lines) == 200
    assert sum("Traceback" in line for line in lines) == 20
    assert sum("something else" in line for line in lines) == 2
    for told in ("bad request from 0 (1900 similar", "it failed for 0 (190 similar"):
        assert sum(f"{told} lines were dropped)" in line for line in lines) == 1
