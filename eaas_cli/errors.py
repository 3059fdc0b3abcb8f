"""Error output of the program: a user's mistake prints one line on standard error and exits with code 2."""

from __future__ import annotations

import sys
from collections.abc import Callable

from eaas.errors import EaasError
from eaas.launcher_pipe import announce
from eaas.log import print_line
from eaas.open_files import shortage_of_files

__all__ = ["exit_with_one_line"]


def exit_with_one_line(app: Callable[[], object]) -> None:
    """Run `app`; an EaasError or a shortage of open files prints one line and exits with code 2.

    If a launcher started this process, it gets the text too.
    """
    try:
        app()
    except Exception as error:
        message = shortage_of_files(error)
        if message is None:
            if not isinstance(error, EaasError):
                raise
            message = str(error)
        announce(error=message)
        print_line(f"eaas: error: {message}", sys.stderr)
        sys.exit(2)
