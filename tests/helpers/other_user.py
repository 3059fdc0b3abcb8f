"""`python -m other_user ...`: run the `eaas` program as user and group 65534 (needs root)."""

from __future__ import annotations

# Imported before the change of user, who may not be allowed to read the interpreter's files.
import encodings.idna  # noqa: F401
import os

NOBODY = 65534


def main() -> None:
    from eaas.launcher_pipe import LAUNCHER_VARIABLE
    from eaas_cli.commands import main as eaas

    # As if started by hand: it may not open its launcher's files.
    os.environ.pop(LAUNCHER_VARIABLE, None)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    eaas()


if __name__ == "__main__":
    main()
