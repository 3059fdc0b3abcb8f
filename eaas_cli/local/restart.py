"""In a launcher: the restart of a process, by itself or by a person who pastes a command."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from eaas_cli.local.process import program

__all__ = ["Restarts", "keep_port", "restart_line", "role_environment"]

# A process that served for this long counts as started; its failures are counted from zero again.
_SETTLED_S = 10.0
# Pauses before the first, second ... restart of a process that fails in a row; the last one repeats.
_PAUSES_S = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0)


class Restarts:
    """When a process that ends again and again starts again. No clock.

    Attributes:
        failures: Ends in a row, each soon after the process served or before.
        serves_since: Time since when it serves; None while it starts or does not run.
        starts_at: Time of its next start; None if none is planned.
    """

    def __init__(self, serves_since: float | None = None, starts_at: float | None = None) -> None:
        self.failures = 0
        self.serves_since, self.starts_at = serves_since, starts_at

    def ended(self, now: float) -> float:
        """Take the end of the process, and plan its next start; return the pause in seconds before it."""
        served_s = now - self.serves_since if self.serves_since is not None else 0.0
        self.failures = 1 if served_s >= _SETTLED_S else self.failures + 1
        pause_s = _PAUSES_S[min(self.failures, len(_PAUSES_S)) - 1]
        self.serves_since, self.starts_at = None, now + pause_s
        return pause_s


def restart_line(arguments: Sequence[str]) -> str:
    """Build the shell command that restarts a role with the same settings from any directory.

    `arguments`: arguments of the `eaas` program; the role is the first.
    """
    settings = role_environment(arguments[0])
    environment = [f"{name}={value}" for name, value in settings.items()]
    return shlex.join((*(("env", *environment) if environment else ()), *program(), *arguments))


def role_environment(command: str) -> dict[str, str]:
    """Select this process's settings (`EAAS_...` variables) of the role that a command runs."""
    from eaas.config.explanations import BETWEEN, variable

    role = command.replace("-", "_")
    # vLLM is an attention client and its own frontend.
    roles = ("attention_client", "frontend") if role == "vllm" else (role,)
    # `security` is left out, because its settings are options and keys must not be printed.
    sections = {variable("telemetry"), *map(variable, roles)}
    if role == "balancer":  # Live knobs hold the autoscaler's latency target.
        sections.add(variable("autoscaler"))
    return {n: v for n, v in os.environ.items() if n.upper().partition(BETWEEN)[0] in sections}


def keep_port(arguments: Sequence[str], address: str) -> tuple[str, ...]:
    """Put the port of `address` into a role's arguments, so that others reach it after a restart."""
    kept = list(arguments)
    kept[kept.index("--port") + 1] = address.rpartition(":")[2]
    return tuple(kept)
