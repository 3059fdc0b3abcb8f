"""`python -m attention_client.vllm_server.start PARENT WORD...`: runs Python with these words.

The kernel sends the program SIGTERM when its parent, `eaas vllm`, ends.
"""

from __future__ import annotations

import os
import signal
import sys

from eaas.parent_death import end_with_parent

__all__ = ["main"]


def main() -> None:
    """Ask the kernel for the signal, then become the program."""
    end_with_parent(int(sys.argv[1]), signal.SIGTERM, "eaas vllm")
    os.execv(sys.executable, [sys.executable, *sys.argv[2:]])


if __name__ == "__main__":
    main()
