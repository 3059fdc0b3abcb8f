"""Restarts: the command that a person pastes, and the pauses between the launcher's attempts."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence

from eaas.config.explanations import BETWEEN, variable
from eaas_cli.local.process import program

__all__ = ["Restarts", "keep_port", "restart_line"]

# A process that served for this long has started well.
_SETTLED_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0


def restart_line(arguments: Sequence[str]) -> str:
    """The shell command that starts a role again with the same settings, in any directory.

    Args:
        arguments: Arguments of the `eaas` program; the role is the first.
    """
    role = arguments[0].replace("-", "_")
    # Not `security`: its settings are options, and keys must not be printed.
    sections = {variable(role), variable("telemetry")}
    if role == "balancer":  # Live knobs hold the autoscaler's latency target.
        sections.add(variable("autoscaler"))
    settings = {n: v for n, v in os.environ.items() if n.upper().partition(BETWEEN)[0] in sections}

    environment = [f"{name}={value}" for name, value in settings.items()]
    return shlex.join((*(("env", *environment) if environment else ()), *program(), *arguments))


def keep_port(arguments: Sequence[str], address: str) -> tuple[str, ...]:
    """The same arguments with the port of `address`, which others know."""
    kept = list(arguments)
    kept[kept.index("--port") + 1] = address.rpartition(":")[2]
    return tuple(kept)


class Restarts:
    """Restart backoff: at once, then after growing pauses, finally never.

    Args:
        most: Restarts stop after this many failures in a row; None: never.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._failures = 0

    def pause_s(self, served_s: float) -> float | None:
        """The pause before the next start; None after too many failures in a row.

        Args:
            served_s: Seconds that the process had served; 0: never.
        """
        self._failures = 1 if served_s >= _SETTLED_S else self._failures + 1
        if self._most is not None and self._failures > self._most:
            return None
        if self._failures == 1:
            return 0.0
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (self._failures - 2))
