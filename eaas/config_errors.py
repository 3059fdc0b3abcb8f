"""What is wrong with a setting, and where it comes from: in one line, for people."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

__all__ = ["BETWEEN", "PREFIX", "explain", "variable"]

PREFIX = "EAAS_"
BETWEEN = "__"


def variable(*place: str) -> str:
    """The environment's name of a section, or of a field of one."""
    return (PREFIX + BETWEEN.join(place)).upper()


def explain(
    error: ValidationError, path: Path | None, given: Mapping[str, Mapping[str, object]]
) -> str:
    """One line: where the first wrong setting comes from, its name, what is wrong."""
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    section, field = (*place, "", "")[:2]
    variables = {name.upper() for name in os.environ}
    if field in given.get(section, {}):
        source = f"--{field.replace('_', '-')}"
    elif known := next(
        (v for v in (variable(*place[:n]) for n in (3, 2, 1)) if v in variables), None
    ):
        source = known
    else:
        source = str(path)
    what = "no such setting" if first["type"] == "extra_forbidden" else first["msg"]
    # One line, whatever whitespace a key has.
    return " ".join(f"{source}: {'.'.join(place)} = {first['input']!r}: {what}".split())
