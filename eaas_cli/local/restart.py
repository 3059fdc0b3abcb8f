"""In the launcher: the arguments of a restart, by itself or by a person who pastes a command."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from eaas.config.explanations import BETWEEN, variable
from eaas_cli.local.process import program

__all__ = ["keep_port", "restart_line"]


def restart_line(arguments: Sequence[str]) -> str:
    """Build the shell command that restarts a role with the same settings from any directory.

    `arguments`: arguments of the `eaas` program; the role is the first.
    """
    # vLLM is an attention client, with that role's settings.
    role = {"vllm": "attention_client"}.get(arguments[0], arguments[0].replace("-", "_"))
    # `security` is left out, because its settings are options and keys must not be printed.
    sections = {variable(role), variable("telemetry")}
    if role == "balancer":  # Live knobs hold the autoscaler's latency target.
        sections.add(variable("autoscaler"))
    settings = {n: v for n, v in os.environ.items() if n.upper().partition(BETWEEN)[0] in sections}

    environment = [f"{name}={value}" for name, value in settings.items()]
    return shlex.join((*(("env", *environment) if environment else ()), *program(), *arguments))


def keep_port(arguments: Sequence[str], address: str) -> tuple[str, ...]:
    """Put the port of `address` into a role's arguments, so that others reach it after a restart."""
    kept = list(arguments)
    kept[kept.index("--port") + 1] = address.rpartition(":")[2]
    return tuple(kept)
