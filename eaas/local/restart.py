"""How a process of a cluster is started again: by a person with a printed line, or by the launcher."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from eaas.config import ClusterConfig
from eaas.config_errors import BETWEEN, variable
from eaas.local.process import program

__all__ = ["Restarts", "keep_port", "restart_line"]

# A process that served for this long has started well.
_SETTLED_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 8.0


def restart_line(arguments: Sequence[str], config: ClusterConfig) -> str:
    """What a person can paste into a shell, in any directory, to start a role with the same settings.

    Args:
        arguments: Of the `eaas` program; the role is the first.
        config: Of the cluster.
    """
    role = arguments[0].replace("-", "_")
    # Security has options for all that its variables say, and keys are not for the screen.
    sections = variable(role), variable("telemetry")
    settings = {n: v for n, v in os.environ.items() if n.upper().partition(BETWEEN)[0] in sections}
    if role == "balancer" and config.balancer.knobs not in ("static", "live"):
        settings[variable(role, "knobs")] = str(Path(config.balancer.knobs).resolve())
    environment = [f"{name}={value}" for name, value in settings.items()]
    return shlex.join((*(("env", *environment) if environment else ()), *program(), *arguments))


def keep_port(arguments: Sequence[str], address: str) -> tuple[str, ...]:
    """The same arguments with the port of an address: others know the process by it."""
    kept = list(arguments)
    kept[kept.index("--port") + 1] = address.rpartition(":")[2]
    return tuple(kept)


class Restarts:
    """When a process that ended is started again: at once, then after growing pauses, at last never.

    Args:
        most: Failures in a row after which it is not started again; None: it always is.
    """

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._failures = 0

    def pause_s(self, served_s: float) -> float | None:
        """The pause after one more end; None: it has failed too often in a row.

        Args:
            served_s: For how long the process had served; 0: it never did.
        """
        self._failures = 1 if served_s >= _SETTLED_S else self._failures + 1
        if self._most is not None and self._failures > self._most:
            return None
        if self._failures == 1:
            return 0.0
        return min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** (self._failures - 2))
