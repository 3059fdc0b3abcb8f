"""Tables in narrow terminals."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from eaas_cli import console
from eaas_cli.commands.client import status_table

ID = "expert-server-gpu-node-17.cluster.example.com-123456"
ADDRESS = "gpu-node-17.cluster.example.com:50051"


def test_a_wide_table_runs_over_and_loses_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = io.StringIO()
    narrow = Console(file=file, width=20, highlight=False)
    monkeypatch.setattr(console, "table_console", lambda: narrow)
    console.print_table(("name", "a long heading"), [("the first row of all", "12,345.678 ms")])
    lines = [line.rstrip() for line in file.getvalue().splitlines()]
    assert lines == [
        "name                  a long heading",
        "the first row of all   12,345.678 ms",
    ]


def test_long_names_in_the_table_of_members_fold() -> None:
    member = {
        "id": ID,
        "state": "SERVING",
        "pid": 4194304,
        "address": ADDRESS,
        "role": "expert-server",
    }
    member |= {"incarnation": 1, "experts": 171, "in_flight": 0}
    coverage = {"min_replicas": 2, "uncovered": []}
    document = {"endpoint": "http://h:1", "epoch": 1, "coverage": coverage, "members": [member]}
    file = io.StringIO()
    Console(file=file, width=80, highlight=False).print(status_table(document))
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    cells = lines[2].split()
    assert (cells[1], cells[2], cells[-2:]) == ("SERVING", "4194304", ["171", "0"])
    shown = "".join("".join(line.split()) for line in lines)
    assert "…" not in shown
    assert {*ID, *ADDRESS} <= {*shown}


def test_a_document_is_printed_with_its_own_names(capsys: pytest.CaptureFixture[str]) -> None:
    rows: list[dict[str, Any]] = [
        {"name": "a", "took_ms": {"p50": 1234.5, "p99": None}, "all": [1], "count": 12345},
        {"name": "bcd", "took_ms": {"p50": 0.123456, "p99": 2.0}, "count": 1, "late": True},
    ]
    console.print_rows(rows, title="two")
    console.print_figures(rows[0])
    words = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert words[3:6] == [
        ["name", "p50", "p99", "count", "late"],
        ["a", "1,234", "-", "12,345"],
        ["bcd", "0.1235", "2", "1", "True"],
    ]
    assert ["took_ms.p99", "-"] in words
    console.print_rows(rows, ("name", "took_ms"))
    assert "count" not in capsys.readouterr().out
