"""The `eaas` program: commands, the local launcher, fault injection, benchmarks for users."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from types import FrameType

__all__ = ["main"]

# gRPC's event engine polls for work for a while after each message: a third of the processor time of an idle
# cluster. Without it, the thread that waits for a call polls. gRPC reads this once, at its first use.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
# gRPC logs a line for each failed TLS handshake, so anybody who can connect could fill the disk.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# Modules of the extra `cli`.
_CLI = ("typer", "rich", "httpx")

_Handler = Callable[[int, FrameType | None], None]


def main() -> None:
    """Run the `eaas` command line; without the packages of the extra `cli`, say what to install and exit.

    Ctrl-C ends it with code 130, unless the command handles it.
    """
    # Before the command and after it there is nothing to clean up, and a KeyboardInterrupt in an import or at
    # the interpreter's end would be a traceback.
    _on_ctrl_c(_end_at_once, signal.default_int_handler)
    # The processes that this one starts import what is installed, not what the current directory holds: in a
    # clone, no compiled modules lie beside an installed wheel.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    missing = next((name for name in _CLI if find_spec(name) is None), None)
    if missing is not None:
        sys.exit(
            f"eaas: error: the program needs {missing}: install this package with its extra `cli`, "
            "`server` (expert servers) or `serve` (the HTTP endpoint)"
        )
    from eaas_cli.commands import main as run

    try:
        _on_ctrl_c(signal.default_int_handler, _end_at_once)
        run()
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
    finally:
        _on_ctrl_c(_end_at_once, signal.default_int_handler)


def _on_ctrl_c(handler: _Handler, former: _Handler) -> None:
    """Replace the former handler, and no other: the parent or the command may have had SIGINT ignored."""
    if signal.getsignal(signal.SIGINT) is former:
        signal.signal(signal.SIGINT, handler)


def _end_at_once(number: int, _frame: FrameType | None) -> None:
    os._exit(128 + number)
