"""`python -m other_user ...`: the `eaas` program as user and group 65534 (as root)."""

from __future__ import annotations

# Imported before the change: that user may not be allowed to read the interpreter's own files.
import encodings.idna  # noqa: F401
import os

NOBODY = 65534


def main() -> None:
    from eaas.cli import main as eaas
    from eaas.local.child import LAUNCHER_VARIABLE

    # Started by hand: it may not open what is its launcher's.
    os.environ.pop(LAUNCHER_VARIABLE, None)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    eaas()


if __name__ == "__main__":
    main()
