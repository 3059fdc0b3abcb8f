"""`eaas bench monitor`: a small run from end to end."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_a_small_run() -> None:
    words = ["--members", "6,12", "--watchers", "2", "--per-connection", "3", "--seconds", "2"]
    ran = subprocess.run(
        [sys.executable, "-m", "eaas", "bench", "monitor", "--json", *words],
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    document = json.loads(ran.stdout)
    assert document["settings"]["per_connection"] == 3
    assert [row["members"] for row in document["registry"]] == [6, 12]
    assert [row["members"] for row in document["rows"]] == [6, 12]
    for row in document["rows"]:
        members = row["members"]
        assert [cell["watchers"] for cell in row["watching"]] == [2, members]
        assert row["falsely_dead"] == 0
        assert row["snapshot"]["bytes"] > 1000 * members
        for cell in (row["heartbeats"], *row["watching"]):
            # Seconds are short: a turn more or less is much.
            assert 0.4 * members < cell["heartbeats_per_s"] < 2 * members
            assert cell["ended"] == cell["out_of_turn"] == 0
            assert 0 < cell["answer_ms"]["p50"] <= cell["answer_ms"]["max"]
            assert cell["cpu_cores"] > 0
            assert cell["rss_mb"] > 10
        for cell in row["watching"]:
            assert cell["goodbye_ms"]["not_told"] == cell["death_ms"]["not_told"] == 0
            assert 0 < cell["goodbye_ms"]["first"] <= cell["goodbye_ms"]["last"]
            # Silent for a lease, of which a part was over before the end.
            assert cell["death_ms"]["last"] > 500
            assert cell["signs_per_s"] == 0
