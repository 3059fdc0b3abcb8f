"""Valid member ids; they appear in file names, URLs, logs, metrics and command lines."""

from __future__ import annotations

import re

from eaas.errors import ConfigError

__all__ = ["ID", "ID_RULE", "LONGEST_ID", "check_id"]

LONGEST_ID = 255
ID = re.compile(r"(?!\.\.?\Z)[A-Za-z0-9._][A-Za-z0-9._-]{0,254}")
"""Pattern of a valid id, for `fullmatch`."""
ID_RULE = (
    f"1 to {LONGEST_ID} letters, digits, '.', '_' or '-', not '.' or '..', and no '-' in front"
)


def check_id(value: str, what: str) -> None:
    """Check that a member id is valid.

    Args:
        value: The id.
        what: Its source, for the message.

    Raises:
        ConfigError: The id breaks the rule.
    """
    if not ID.fullmatch(value):
        raise ConfigError(f"{what} {value[:LONGEST_ID]!r}: an id has {ID_RULE}; give another one")
