"""`python -m benchmarks.monitor`: a small run from end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import monitor as bench_monitor
from benchmarks.monitor import Plan, make_plan
from benchmarks.monitor import __main__ as command

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

# What no option says: a quicker pulse, and less of what a figure for people needs more of.
INTERVAL_S = 0.5


def small_plan(**words: Any) -> Plan:
    return replace(make_plan(**words), interval_s=INTERVAL_S, settle_s=0.5, deaths=1)


def test_a_small_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "end_on_sigterm", lambda: None)
    monkeypatch.setattr(bench_monitor, "make_plan", small_plan)
    words = ["--members", "3,8", "--watchers", "3", "--per-connection", "3", "--seconds", "1"]
    words += ["--snapshot-watchers", "5"]
    ran = CliRunner().invoke(command.app, ["--json", *words], catch_exceptions=False)
    assert ran.exit_code == 0, ran.output
    document = json.loads(ran.stdout)
    assert document["settings"]["per_connection"] == 3
    assert [row["members"] for row in document["rows"]] == [3, 8]
    watching = [[cell["watchers"] for cell in row["watching"]] for row in document["rows"]]
    assert watching == [[3], [3, 8]]
    for row in document["rows"]:
        members = row["members"]
        assert row["snapshot"]["bytes"] > 1000 * members
        storm = row["snapshots"]
        assert storm["watchers"] == 5
        assert storm["snapshots"] > 5
        assert storm["megabytes"] > 0
        assert storm["refused"] == 0
        for cell in (row["heartbeats"], storm, *row["watching"]):
            # Seconds are short: a turn more or less is much.
            beats = cell["heartbeats_per_s"] * INTERVAL_S
            assert 0.4 * members < beats < 2 * members
            assert cell["ended"] == cell["out_of_turn"] == 0
            assert 0 < cell["answer_ms"]["p50"] <= cell["answer_ms"]["max"]
            assert cell["cpu_cores"] > 0
            assert cell["rss_mb"] > 10
            assert cell["hold_ms"] > 0
            assert cell["lag_ms"] > 0
        for cell in row["watching"]:
            assert cell["goodbye_ms"]["not_told"] == cell["death_ms"]["not_told"] == 0
            assert 0 < cell["goodbye_ms"]["first"] <= cell["goodbye_ms"]["last"]
            # Silent for a lease, of which a part was over before the end.
            assert cell["death_ms"]["last"] > 500
            assert cell["signs_per_s"] == 0
