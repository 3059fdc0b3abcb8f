"""A worker process: a cell as a line of JSON on standard input, its result as a line on standard output.

It ends with its input, so none is left behind by a parent that was killed.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from eaas.errors import ConfigError
from simulator.caps.cell import run_cell

__all__ = ["main"]


def main() -> None:
    """Serve until the input ends."""
    for line in sys.stdin:
        try:
            answer: dict[str, Any] = {"result": run_cell(**json.loads(line))}
        except ConfigError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
