"""`python -m eaas_cli.ray.child PARENT ARGUMENTS`: the `eaas` program, killed when its Ray actor ends.

Killed, since Ray starts the actor again at once, and a process that drains would hold the same member id.
"""

from __future__ import annotations

import signal
import sys

from eaas.parent_death import end_with_parent
from eaas_cli import main

if __name__ == "__main__":
    end_with_parent(int(sys.argv.pop(1)), signal.SIGKILL, "the Ray actor")
    main()
