"""docs/reliability.md says what there is: each row of the fault contract has tests, and they are these."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import script

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def maker() -> Any:
    return script(DOCS / "make_reliability.py")


def test_every_row_of_the_fault_contract_has_a_test(maker: Any) -> None:
    rows = [row["row"] for row in json.loads((DOCS / "fault_rows.json").read_text())]
    assert rows[:38] == list(range(1, 39))
    assert rows == sorted(set(rows))
    assert set(rows) - maker.tests().keys() == set()


def test_the_table_is_of_today(maker: Any) -> None:
    assert maker.PAGE.read_text() == maker.page(), "run `python docs/make_reliability.py`"


def test_outcomes_of_a_run_are_noted(
    maker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, report = tmp_path / "rows.json", tmp_path / "rows.xml"
    rows.write_text(
        json.dumps([{"row": 4, "last_run": "before"}, {"row": 5, "last_run": "before"}])
    )
    report.write_text(
        '<testsuites><testsuite timestamp="2026-01-02T03:04:05"><testcase name="test_row_5_a[x]"/>'
        '<testcase name="test_row_5_b"><failure/></testcase><testcase name="test_other"/>'
        '<testcase name="test_row_5_c"><skipped/></testcase></testsuite></testsuites>'
    )
    monkeypatch.setattr(maker, "ROWS", rows)
    maker.note(report)
    assert [row["last_run"] for row in json.loads(rows.read_text())] == [
        "before",
        "2026-01-02: 1 passed, 1 failed, 1 skipped",
    ]
