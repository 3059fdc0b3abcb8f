"""`eaas bench rebalance` as a person runs it."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_the_document_has_every_round() -> None:
    options = ["--share-mb", "60", "--quiet", "1", "--rounds", "2", "--calls", "200", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "eaas", "bench", "rebalance", *options],
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["share_bytes"] > 30_000_000
    assert len(document["rows"]) == 2
    for row in document["rows"]:
        assert row["prepare_s"] > 0
        assert row["retire_s"] > 0
        assert row["calls"]["meanwhile"] > 0
        assert row["ratio"] > 0
    assert min(r["ratio"] for r in document["rows"]) <= document["ratio"]
