"""The end of the program: quick, and without a word of what it imported."""

from __future__ import annotations

import subprocess
import sys

from interpreted_triton import needs_triton

PROGRAM = """
import sys
import triton
import eaas_cli.commands as commands
sys.argv[1:] = ["--version"]
print("before", file=sys.stderr)
commands.main()
"""


@needs_triton
def test_tritons_bindings_print_no_leaks() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "before\n")
