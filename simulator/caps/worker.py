"""A worker process: a cell as a line of JSON on standard input, its result as a line on standard output.

It ends with its input, so a killed parent leaves no worker behind.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from eaas.errors import EaasError
from simulator.caps.cell import run_cell

__all__ = ["main"]


def main() -> None:
    """Serve until the input ends."""
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"result": run_cell(**json.loads(line))}
        except EaasError as error:
            answer = {"error": str(error)}
        try:
            print(json.dumps(answer), flush=True)
        except BrokenPipeError:
            # The parent is gone: discard this answer and what Python flushes at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return


if __name__ == "__main__":
    main()
