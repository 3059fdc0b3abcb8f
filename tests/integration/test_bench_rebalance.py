"""The document of `eaas bench rebalance`."""

from __future__ import annotations

import json
from functools import partial

import pytest
from typer.testing import CliRunner

from eaas.bench import rebalance
from eaas.cli import app, bench
from eaas.local.nursery import Nursery

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_the_document_has_every_round(nursery: Nursery, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command, in a process that has imported what it needs."""
    monkeypatch.setattr(bench, "_end_on_sigterm", lambda: None)
    forked = partial(rebalance.bench_rebalance, nursery=nursery)
    monkeypatch.setattr(rebalance, "bench_rebalance", forked)
    options = ["--share-mb", "60", "--quiet", "1", "--rounds", "2", "--calls", "200", "--json"]
    done = CliRunner().invoke(app, ["bench", "rebalance", *options], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout)
    assert document["share_bytes"] > 30_000_000
    assert len(document["rows"]) == 2
    for row in document["rows"]:
        assert row["prepare_s"] > 0
        assert row["retire_s"] > 0
        assert row["calls"]["meanwhile"] > 0
        assert row["ratio"] > 0
    assert min(r["ratio"] for r in document["rows"]) <= document["ratio"]
