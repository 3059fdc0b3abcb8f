"""The `eaas` program: commands, the local launcher, fault injection, benchmarks for users."""

from __future__ import annotations

import os
import sys

__all__ = ["main"]

# gRPC's event engine polls for work for a while after each message: a third of the processor time of an idle
# cluster. Without it, the thread that waits for a call polls. gRPC reads this once, at its first use.
os.environ.setdefault("GRPC_EXPERIMENTS", "-event_engine_client,-event_engine_listener")
# gRPC logs a line for each failed TLS handshake, so anybody who can connect could fill the disk.
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

# The processes that this program starts import what is installed. In a clone, Python would look there first, where
# an installed wheel leaves no compiled modules.
os.environ.setdefault("PYTHONSAFEPATH", "1")

# Modules of the extra `cli`.
_CLI = ("typer", "rich", "httpx")


def main() -> None:
    """Run the `eaas` command line; without the packages of the extra `cli`, say what to install and exit."""
    try:
        from eaas_cli.commands import main as run
    except ModuleNotFoundError as error:
        if error.name not in _CLI:
            raise
        sys.exit(
            f"eaas: error: the program needs {error.name}: install this package with its extra `cli`, "
            "`server` (expert servers) or `serve` (the HTTP endpoint)"
        )
    run()
