"""One-line messages about wrong settings: where the value comes from, and what is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError

from eaas.config.former import FORMER_SETTINGS

__all__ = ["BETWEEN", "PREFIX", "explain", "variable"]

PREFIX = "EAAS_"
BETWEEN = "__"


def variable(*place: str) -> str:
    """Name of the environment variable that sets a section or a field in it, for errors and their check."""
    return (PREFIX + BETWEEN.join(place)).upper()


def explain(
    error: ValidationError, path: Path | None, given: Mapping[str, Mapping[str, object]]
) -> str:
    """Describe the first wrong setting in one line: source, name, value, problem.

    Args:
        error: The validation error.
        path: The configuration file, if there is one.
        given: Fields that the command line sets, by section.
    """
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
    name = ".".join(place)
    if now := FORMER_SETTINGS.get(name):
        what = f"no longer a setting: it {now}. Delete this setting"
    elif first["type"] == "extra_forbidden":
        what = "no such setting"
    else:
        # pydantic puts "Value error" before what a validator of ours says.
        what = first["msg"].removeprefix("Value error, ")
    # A key may contain line breaks.
    return " ".join(f"{source}: {name} = {first['input']!r}: {what}".split())
