"""Make the table of docs/reliability.md: each row of the fault contract, and the tests named after it.

    python docs/make_reliability.py             # after a test of a row was added, removed or renamed
    python docs/make_reliability.py rows.xml    # also records the rows' last run

`python -m pytest -k test_row_ --junitxml rows.xml` writes rows.xml. docs/fault_rows.json holds the rows and
their last runs.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
ROWS, PAGE = ROOT / "docs" / "fault_rows.json", ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- rows: made by make_reliability.py -->\n", "<!-- end of rows -->"
_TEST = re.compile(r"^def (test_row_(\d+)_\w+)\(", re.MULTILINE)


def tests() -> dict[int, list[tuple[str, str]]]:
    """(file, name) of the tests of each row."""
    found: dict[int, list[tuple[str, str]]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name, row in _TEST.findall(path.read_text()):
            found.setdefault(int(row), []).append((str(path.relative_to(ROOT)), name))
    return found


def table() -> str:
    """The table's lines."""
    lines = [
        "| # | Case | What must happen | What is measured | Tests | Last run |",
        "|" + "---|" * 6,
    ]
    by_row = tests()
    for row in json.loads(ROWS.read_text()):
        named = "<br>".join(
            f"[`{name.removeprefix('test_')}`](../{path})"
            for path, name in by_row.get(row["row"], [])
        )
        cells = (row["row"], row["case"], row["must"], row["measured"], named, row["last_run"])
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def page() -> str:
    """The page with the current table."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


def note(report: Path) -> None:
    """Record the outcomes of a pytest run in the rows."""
    outcomes: dict[int, list[str]] = {}
    tree = ElementTree.parse(report)
    for case in tree.iter("testcase"):
        match = re.match(r"test_row_(\d+)_", case.get("name", ""))
        if match:
            ended = {child.tag for child in case}
            failed = bool(ended & {"failure", "error"})
            outcome = "failed" if failed else "skipped" if "skipped" in ended else "passed"
            outcomes.setdefault(int(match[1]), []).append(outcome)
    suite = next(tree.iter("testsuite"))
    day = suite.get("timestamp", "")[:10]
    rows = json.loads(ROWS.read_text())
    for row in rows:
        if told := outcomes.get(row["row"]):
            counts = ", ".join(
                f"{told.count(o)} {o}" for o in ("passed", "failed", "skipped") if o in told
            )
            row["last_run"] = f"{day}: {counts}"
    ROWS.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        note(Path(argument))
    PAGE.write_text(page())
